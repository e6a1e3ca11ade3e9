"""The code in the documentation, run as printed."""

import pathlib
import re

from speculative import checkpoints

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_quick_start_runs_as_printed(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 11
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)  # noqa: S102
    fast, plain = names["fast"], names["plain"]
    assert fast.tokens == plain.tokens  # type: ignore[attr-defined]
    assert "tokens a target call" in capsys.readouterr().out


def test_the_documented_draft_runs_as_printed(capsys):
    page = README.parent / "docs" / "drafts.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(page), "exec"), {"__name__": "documented"})  # noqa: S102
    assert "target_calls" in capsys.readouterr().out


def test_the_shipped_pair_fits_its_budget():
    files = [path for path in checkpoints.ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 64e6
