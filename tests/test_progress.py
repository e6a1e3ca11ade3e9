"""The bar of long work, as a terminal of 80 columns shows it."""

import io
import re

from rich.console import Console

from speculative import progress

NAME = "2 of 4, debian_synopsis_t0"


def shown(name: str, terminal: bool) -> list[str]:
    """The lines that a terminal shows one after another, of work in two phases."""
    file = io.StringIO()
    with progress.bar(name, Console(file=file, width=80, force_terminal=terminal)) as on_progress:
        on_progress("loading", 0)
        for number in range(4):
            on_progress("decoding", number / 4)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    return [line for line in re.split("[\r\n]+", plain) if line]


def test_every_phase_is_named_and_none_stands_at_its_end() -> None:
    lines = shown(NAME, terminal=True)
    phases = [line.partition(":")[0] for line in lines if ":" in line.partition(" ")[0]]
    assert list(dict.fromkeys(phases)) == ["loading", "decoding"]
    assert f"decoding: {NAME} " in lines[-1]
    assert " 75% " in lines[-1] and lines[-1].endswith(" to go")
    # Nothing is said of the share and the time of work of which neither is known.
    assert not any("%" in line or "to go" in line for line in lines if "loading" in line)
    assert not any("100%" in line or len(line) > 80 for line in lines)


def test_a_long_name_leaves_room_for_the_phase_and_the_time() -> None:
    lines = shown("a[b]" * 50, terminal=True)
    assert lines[-1].startswith("decoding: a[b]a[b]a[b]") and lines[-1].endswith(" to go")
    assert max(map(len, lines)) == 80


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    assert shown(NAME, terminal=False) == []
