"""The demo around its rows: what it asks for, what it keeps, what an interrupt leaves."""

import pathlib
from typing import Any

import pytest

from speculative import cli
from speculative.experiments import demo, records, traces
from speculative.experiments.run import Row
from speculative.experiments.traces import Line, PromptTrace
from speculative.pair import Result
from tests.experiments import made

ROWS = [(task, t) for task in ("debian_ende", "debian_synopsis") for t in (0.0, 1.0)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces what takes long, measuring and tracing; holds what each row was asked with."""
    calls: list[dict[str, Any]] = []

    def run_row(pair, config, prompts, experiment, on_progress) -> Row:
        calls.append({"config": config, "prompts": prompts})
        on_progress("timing", 0.5)
        greedy = config.sampling.greedy
        return made.row(
            task=config.task,
            temperature=config.temperature,
            gamma=len(calls),
            seed=config.seed,
            speedup=len(calls) + 0.25,
            outputs_identical=len(prompts) if greedy else None,
            near_ties=0 if greedy else None,
        )

    def trace(pair, source, gamma, sampling, max_length, seed) -> PromptTrace:
        call = calls[gamma - 1]
        config = call["config"]
        assert (source, sampling) == (call["prompts"][0].source, config.sampling)
        assert (max_length, seed) == (config.max_length, config.seed)
        return PromptTrace(source, [Line(" a", "", " b", 1)], Result("a b", [7, 8], 1, 1, 1), True)

    monkeypatch.setattr(demo, "run_row", run_row)
    monkeypatch.setattr(traces, "trace", trace)
    return calls


@pytest.fixture
def arguments(saved_pair: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> list[str]:
    target, draft = saved_pair
    options = ["--target", str(target), "--draft", str(draft), "--output_dir", str(tmp_path / "d")]
    return ["demo", *options, "--max_length", "6", "--limit", "2", "--seed", "3"]


def test_both_tasks_at_both_temperatures(
    asked: list[dict[str, Any]], arguments: list[str], tmp_path: pathlib.Path, capsys
) -> None:
    assert cli.main(arguments) == 0
    assert [(call["config"].task, call["config"].temperature) for call in asked] == ROWS
    for call in asked:
        assert len(call["prompts"]) == 2
        assert (call["config"].seed, call["config"].max_length) == (3, 6)
        assert call["config"].gamma is None  # The program chooses.
    kept = records.read(tmp_path / "d" / "records.jsonl")
    assert [(record.task, record.temperature) for record in kept] == ROWS
    out = capsys.readouterr().out
    report = (tmp_path / "d" / "report.md").read_text(encoding="utf-8")
    for text in (out, report):
        for number in range(1, 5):
            assert f" {number}.25" in text
        assert "the same tokens in 4 of 4" in text
        assert "translate English to German: " in text
    assert f"{tmp_path / 'd' / 'records.jsonl'}" in out.replace("\n", "")

    # A new run replaces what an earlier one left.
    assert cli.main(arguments) == 0
    assert len(records.read(tmp_path / "d" / "records.jsonl")) == 4


def test_an_interrupt_leaves_finished_rows(
    asked: list[dict[str, Any]],
    arguments: list[str],
    tmp_path: pathlib.Path,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli.main(arguments) == 0
    asked.clear()
    capsys.readouterr()
    measure = demo.run_row

    def interrupted(*positional, **settings) -> Row:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(*positional, **settings)

    monkeypatch.setattr(demo, "run_row", interrupted)
    assert cli.main(arguments) == 130
    file = tmp_path / "d" / "records.jsonl"
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"interrupted; 2 finished rows are in {file}\n"
    assert [(record.task, record.temperature) for record in records.read(file)] == ROWS[:2]
    assert not (tmp_path / "d" / "report.md").exists()
