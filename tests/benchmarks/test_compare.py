"""The comparison of programs: with stand-ins of known times, and with one that is real."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import compare_peers as compare
from benchmarks.peers.system import PROGRAMS, Process, Program, Setting
from speculative.rows import memory
from speculative.types import EOS_ID
from tests.printed import printed

SOURCES = [[5, 6, EOS_ID], [7, EOS_ID], [8, 9, EOS_ID]]
SECONDS = {("speculative", "autoregressive"): 0.5, ("speculative", "speculative"): 0.25}
SECONDS |= {("transformers", "autoregressive"): 1.0, ("ctranslate2", "float32"): 2.0}


THERE = Program("", (), "")  # It needs nothing.


class Made:
    """A program whose outputs and times are known; the first of each kind compiles."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.ways = tuple(way for program, way in SECONDS if program == name)
        self.asked = 0
        self.closed = False

    def decode(self, way: str, source: list[int]) -> tuple[list[int], float]:
        self.asked += 1
        outputs = {5: [3, 4, EOS_ID], 7: [4, EOS_ID], 8: [6, EOS_ID]}
        output = outputs[source[0]]
        if self.name == "ctranslate2" and source[0] == 5:
            output = [3, 9, EOS_ID]
        if self.name == "ctranslate2" and source[0] == 8:
            output = [6]
        return output, SECONDS[self.name, way] * (10 if self.asked <= len(SOURCES) else 1)

    def prefill(self, source: list[int]) -> float:
        return 0.001 * len(source)

    def margin(self, source: list[int], prefix: list[int], one: int, other: int) -> float:
        assert (source, prefix, one, other) == (SOURCES[0], [3], 4, 9)
        return 2e-4

    def close(self) -> None:
        self.closed = True


def setting(**changes: Any) -> Setting:
    fields: dict[str, Any] = {
        "target": "the_target",
        "draft": "the_draft",
        "random": False,
        "exported": "",
        "max_length": 16,
        "gamma": 3,
    }
    return Setting(**(fields | changes))


def compared(
    monkeypatch: pytest.MonkeyPatch,
    programs: dict[str, Program],
    rounds: int = 1,
    timed: int = 3,
    start: Callable[[str, Setting], Made] = Made,
) -> compare.Comparison:
    monkeypatch.setattr(compare, "PROGRAMS", programs)
    monkeypatch.setattr(compare, "Process", start)
    given = setting(), SOURCES, list(programs), rounds, timed
    return compare.compare(*given, lambda what, share: None)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> compare.Comparison:
    programs = {name: THERE for name in ("speculative", "transformers", "ctranslate2")}
    programs["t5x"] = Program("", ("no_such_module.within",), "clone it")
    return compared(monkeypatch, programs, 3, 2)


def test_ratios_are_of_medians_over_the_timed_sources(found: compare.Comparison) -> None:
    assert found.seconds["transformers", "autoregressive"] == [2.0, 2.0, 2.0]
    assert found.tokens["transformers", "autoregressive"] == 5
    assert found.ms_per_token(("transformers", "autoregressive")) == pytest.approx(2000 / 5)
    assert found.ratio(("transformers", "autoregressive"), "autoregressive") == pytest.approx(2)
    assert found.ratio(("transformers", "autoregressive"), "speculative") == pytest.approx(4)
    assert found.prefill["speculative", 512] == pytest.approx([0.512] * 3)


def test_outputs_are_compared_token_by_token(found: compare.Comparison) -> None:
    assert found.differences is not None
    assert found.differences["speculative", "speculative"] == []
    tie, short = found.differences["ctranslate2", "float32"]
    assert (tie.source, tie.token, tie.margin) == (0, 1, 2e-4)
    assert (short.source, short.token, short.margin) == (2, 1, None)
    assert (tie.near_tie, short.near_tie) == (True, False)


def test_without_the_measure_nothing_is_called_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(monkeypatch, {"speculative": THERE})
    assert found.differences is None
    assert found.to_json()["ways"][0]["differences"] is None
    assert "3/3" not in printed(compare.show, found)


def test_a_program_that_cannot_load_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, setting: Setting) -> Made:
        if name == "transformers":
            raise RuntimeError("transformers failed: a trace\nOSError: no such file\n")
        return Made(name, setting)

    programs = {name: THERE for name in ("speculative", "transformers")}
    found = compared(monkeypatch, programs, start=start)
    assert found.missing == {"transformers": "OSError: no such file"}
    assert {name for name, _ in found.seconds} == {"speculative"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--models", "gpt2"], "gpt2"),
        (["--rounds", "0"], "from 1"),
        (["--timed", "-1"], "from 1"),
        (["--gamma", "0"], "from 1"),
        (["--models", "debian", "t5_1_1_xxl"], "Comparing t5_1_1_xxl needs"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: ("a small machine", 2**33))
    monkeypatch.setattr("sys.argv", ["compare_peers.py", *options])
    with pytest.raises(SystemExit):
        compare.main()
    assert said in capsys.readouterr().err


def test_what_is_absent_is_named_and_left_out(found: compare.Comparison) -> None:
    assert found.missing == {"t5x": "no_such_module.within"}
    text = printed(compare.show, found)
    assert "t5x was left out (no_such_module.within); clone it." in text
    assert "3/3" in text
    assert "1/3, 1 ties" in text
    written = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert written["missing"] == found.missing
    assert written["ways"][2]["over"] == {"autoregressive": 2.0, "speculative": 4.0}


@pytest.mark.long
def test_this_package_in_a_process_of_its_own(
    saved_pair: tuple[pathlib.Path, pathlib.Path],
) -> None:
    target, draft = map(str, saved_pair)
    process = Process("speculative", setting(target=target, draft=draft))
    try:
        alone, both = "autoregressive", "speculative"
        assert process.ways == (alone, both, f"{alone}, int8", f"{both}, int8")
        for of_target in ("", ", int8"):
            autoregressive, seconds = process.decode(alone + of_target, [5, 6, 7, EOS_ID])
            assert seconds > 0
            assert 1 <= len(autoregressive) <= 16
            found, _ = process.decode(both + of_target, [5, 6, 7, EOS_ID])
            assert found == autoregressive
        assert process.prefill([5, EOS_ID]) > 0
        with pytest.raises(RuntimeError, match="(?s)speculative failed.*no_such_way"):
            process.decode("no_such_way", [5])
    finally:
        process.close()


def test_what_programs_need_is_looked_for() -> None:
    assert PROGRAMS["speculative"].missing() is None
    assert Program("", ("json", "no_such_module"), "").missing() == "no_such_module"
