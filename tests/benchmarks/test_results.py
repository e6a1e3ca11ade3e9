"""The page of results: its tables are those of the records, and measuring resumes."""

import json
import pathlib
import subprocess
from typing import Any

import pytest

from benchmarks import pages, results


def test_the_page_has_the_tables_of_its_records() -> None:
    page = results.PAGE.read_text()
    assert pages.filled(page, results.TABLES) == page
    assert [name for _, name, _ in pages.SHOWN.findall(page)] == list(results.TABLES)
    for name, table in results.TABLES.items():
        _, ruled, *rows = [line for line in table().splitlines() if line.startswith("|")]
        assert rows and ruled.startswith("| :--") or name == "lenience", name
        # Not every program has every model.
        assert name in ("peers", "prefill") or not any("|  |" in row for row in rows), name


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    tables = {"a": lambda: "new A", "b": lambda: "new B"}
    page = "x\n<!-- table: a -->\nold\n\n<!-- end -->\ny\n<!-- table: b -->\n<!-- end -->\n"
    new = "x\n<!-- table: a -->\nnew A\n<!-- end -->\ny\n<!-- table: b -->\nnew B\n<!-- end -->\n"
    assert pages.filled(page, tables) == pages.filled(new, tables) == new


def test_what_is_measured_is_not_measured_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    fails, stopped = {"second"}, {"third"}

    def run(command: list[str], **_: Any) -> Any:
        output = pathlib.Path(command[-1].removeprefix("--output_dir="))
        ran.append(output.name)
        output.mkdir(parents=True, exist_ok=True)
        (output / "found.json").write_text(json.dumps({"made by": command[2]}, indent=1))
        if output.name in stopped:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, int(output.name in fails))

    parts = {
        name: results.Part((f"of.{name}",), ("found.json",), f"kept_{name}")
        for name in ("first", "second", "third")
    }
    monkeypatch.setattr(results, "PARTS", parts)
    monkeypatch.setattr(results, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(results.subprocess, "run", run)
    with pytest.raises(SystemExit, match="second ended with code 1; run it again to resume"):
        results.measure(list(parts), tmp_path / "work", ())
    assert ran == ["first", "second"] and not (tmp_path / "records").exists()
    fails.clear()
    with pytest.raises(SystemExit, match="third was stopped; run it again to resume"):
        results.measure(list(parts), tmp_path / "work", ())
    stopped.clear()
    results.measure(list(parts), tmp_path / "work", ())
    assert ran == ["first", "second", "second", "third", "third"]
    kept = (tmp_path / "records" / "kept_third" / "found.json").read_text()
    assert kept == '{"made by":"of.third"}\n'
