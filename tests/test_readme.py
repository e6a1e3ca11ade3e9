"""The code in the documentation, run as printed."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import run_docs
from speculative import checkpoints
from speculative.decoding import rules
from speculative.drafts import named
from speculative.models import registry
from speculative.tasks import TASKS

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_quick_start_runs_as_printed(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 11
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)  # noqa: S102
    fast, alone = names["fast"], names["alone"]
    assert fast.tokens == alone.tokens  # type: ignore[attr-defined]
    assert "tokens per target call" in capsys.readouterr().out


@pytest.mark.parametrize("page", run_docs.PAGES)
def test_commands_are_known_and_have_the_options_they_name(page: str) -> None:
    """Of the package; scripts/run_docs.py runs them."""
    found = [*run_docs.commands((run_docs.ROOT / page).read_text(encoding="utf-8"))]
    assert found or page != "README.md"
    for command in found:
        assert not run_docs.wrong(command), command


@pytest.fixture
def registries() -> Iterator[None]:
    """What a page registers is gone for other tests."""
    all_: list[dict[str, Any]] = [named.MODEL_FREE, rules.RULES, registry.FAMILIES, TASKS]
    before = [dict(entries) for entries in all_]
    yield
    for entries, kept in zip(all_, before, strict=True):
        entries.clear()
        entries.update(kept)


@pytest.mark.long
@pytest.mark.usefixtures("registries")
def test_the_page_on_extending_runs_as_printed(
    saved_pair: tuple[pathlib.Path, pathlib.Path], capsys, monkeypatch: pytest.MonkeyPatch
):
    """Block after block, with a tiny pair for the shipped one; each takes less than a page."""
    target, draft = saved_pair
    for name in ("debian_target", "debian_draft", "debian_draft_hidden"):
        monkeypatch.setitem(checkpoints.SHIPPED, name, target if name.endswith("target") else draft)
    page = README.parent / "docs" / "extending.md"
    names: dict[str, object] = {"__name__": "documented"}
    sections = page.read_text(encoding="utf-8").split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [
        "First, on one page",
        "A draft",
        "A logits processor",
        "A verification rule",
        "A family of models",
        "A task",
        "A table",
    ]
    for section in sections:
        code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert 0 < len("".join(code).splitlines()) <= 50
        for block in code:
            exec(compile(block, str(page), "exec"), names)  # noqa: S102
    assert "tokens per call" in capsys.readouterr().out


def test_the_shipped_pair_fits_its_budget():
    files = [path for path in checkpoints.ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 64e6
