"""Verdicts on programs' samples: this one's own pass, a planted fault is found, errors are kept."""

import json
import pathlib
import sys

import pytest

from benchmarks import pages
from benchmarks.verdicts import __main__ as verdicts

FEW = verdicts.Case("debian_lm", "debian_lm_draft", "decoder", "debian_lm", 4, 32, ("T = 1",))


@pytest.mark.long
def test_a_way_is_judged_with_and_without_a_fault(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on: the second run has nothing to do."""
    ways = {"token": {"speculative": True}, "other": {"kinds": ["encoder-decoder"]}}
    monkeypatch.setattr(verdicts, "CASES", (FEW,))
    monkeypatch.setattr(verdicts, "listed", lambda *_: {"version": "1", "ways": ways})
    output = tmp_path / "verdicts.jsonl"
    given = ["--output", str(output), "--programs", f"speculative={sys.executable}"]
    verdicts.main(given)
    exact, planted = map(json.loads, output.read_text().splitlines())
    assert (exact["way"], exact["planted"], exact["passed"]) == ("token", False, True)
    assert (planted["way"], planted["planted"], planted["passed"]) == ("token", True, False)
    assert exact["texts"] == planted["texts"] == 128
    before = output.stat().st_mtime_ns
    verdicts.main(given)
    assert output.stat().st_mtime_ns == before
    _, _, row = verdicts.table([exact, planted]).splitlines()
    assert row.startswith("| `debian_lm` | speculative 1 | token | 128 | passed, p = ")
    assert row.endswith(" | found |")
    *_, power = verdicts.power_table(
        [exact, planted | {"power": {"a": 0.5, "b": 1.0}}]
    ).splitlines()
    assert power == "| `debian_lm`, debian_lm_draft, T = 1, 128 | 0.50 | 1.00 |"


def test_the_page_has_the_tables_of_its_records() -> None:
    page = (verdicts.ROOT / "docs" / "verdicts.md").read_text()
    records = verdicts.ROOT / "docs" / "records" / "verdicts" / "verdicts.jsonl"
    kept = [json.loads(line) for line in records.read_text().splitlines()]
    tables = {"verdicts": lambda: verdicts.table(kept), "power": lambda: verdicts.power_table(kept)}
    assert pages.filled(page, tables) == page


def test_an_adapter_that_fails_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        RuntimeError, match="speculative's adapter ended with code 1: .*ModuleNotFound"
    ):
        verdicts.listed("speculative", _without_packages(tmp_path))
    one = {"target": "t", "program": "p", "version": "2", "way": "w", "setting": "T = 1"}
    row = verdicts.table([one | {"planted": False, "error": "it ended"}]).splitlines()[-1]
    assert "| could not be run |" in row
    failed = {"planted": False, "passed": False, "impossible": 0, "p_values": {"tokens": 1e-9}}
    assert "**failed**, p = 1e-09" in verdicts.table([one | failed])


def _without_packages(folder: pathlib.Path) -> str:
    """An interpreter that sees no installed package."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\ncd /; exec {sys.executable} -I -S "$@"\n')
    file.chmod(0o755)
    return str(file)
