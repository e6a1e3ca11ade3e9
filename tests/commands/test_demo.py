"""The demo around its rows: what it asks for, what it keeps, what an interrupt leaves."""

import dataclasses
import pathlib
from typing import Any

import pytest

from speculative import cli
from speculative.commands import demo
from speculative.pair import Pair, Request, Result
from speculative.reporting import traces
from speculative.reporting.traces import Line, PromptTrace
from speculative.rows import records
from speculative.rows.config import experiment, read_row
from speculative.rows.records import Record
from speculative.studies import sweep
from tests.printed import printed
from tests.rows import made

ROWS = [(task, t) for task in ("debian_ende", "debian_synopsis") for t in (0.0, 1.0)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces what takes long, measuring and tracing; holds what each row was asked with."""
    calls: list[dict[str, Any]] = []
    traced: list[str] = []

    def run_row(pair, config, prompts, experiment, kept, on_progress, share) -> Record:
        calls.append({"config": config, "prompts": prompts})
        on_progress("timing", 0.5)
        greedy = config.sampling.greedy
        return made.record(
            experiment=experiment,
            task=config.task,
            temperature=config.temperature,
            gin=config.gin(),
            seed=config.seed,
            speedup=len(calls) + 0.25,
            outputs_identical=len(prompts) if greedy else None,
            near_ties=0 if greedy else None,
        )

    def trace(pair: Pair, source: str, request: Request) -> PromptTrace:
        inputs, decoding = request.source, request.config
        call = calls[len(traced) % len(ROWS)]
        traced.append(source)
        texts = [prompt.source for prompt in call["prompts"]]
        assert source == texts[0]
        # As wide as all texts, so that it runs the program that decoded them.
        assert inputs.shape == (1, pair.encode(texts).shape[1])
        assert (inputs == pair.encode(texts)[0]).all()
        assert (request.seed, request.example) == (call["config"].seed, 0)
        assert (decoding.gamma, decoding.max_length) == (call["config"].gamma, 6)
        return PromptTrace(
            source, [Line(" a", "", " b", 1)], Result("a b", [7, 8], 1, 1, [1], [1]), True,
            [" a", " b"],
        )  # fmt: skip

    monkeypatch.setattr(sweep, "run_row", run_row)
    monkeypatch.setattr(traces, "trace", trace)
    return calls


@pytest.fixture
def arguments(pair_options: list[str], tmp_path: pathlib.Path) -> list[str]:
    options = [*pair_options, "--output_dir", str(tmp_path / "d")]
    return ["demo", *options, "--max_length", "6", "--limit", "2", "--seed", "3"]


def test_both_tasks_at_both_temperatures(
    asked: list[dict[str, Any]], arguments: list[str], tmp_path: pathlib.Path, capsys
) -> None:
    assert cli.main(arguments) == 0
    assert [(call["config"].task, call["config"].temperature) for call in asked] == ROWS
    for call in asked:
        assert len(call["prompts"]) == 2
        assert (call["config"].seed, call["config"].max_length) == (3, 6)
        assert call["config"].gamma == (7 if call["config"].task == "debian_ende" else 5)
    kept = records.read(tmp_path / "d" / "records.jsonl")
    assert [(record.task, record.temperature) for record in kept] == ROWS
    out = capsys.readouterr().out
    report = (tmp_path / "d" / "report.md").read_text(encoding="utf-8")
    kept = traces.read(tmp_path / "d")
    assert (
        len(kept) == 4 and kept[0][1].steps == [(" a", " b")] and kept[0][1].pieces == [" a", " b"]
    )
    page = (tmp_path / "d" / "report.html").read_text(encoding="utf-8")
    assert page.count('class="race"') == 2 and "<i> a</i><b> b</b>" in page
    for text in (out, report):
        for number in range(1, 5):
            assert f" {number}.25" in text
        assert "for the first prompt of 4 of 4 rows" in " ".join(text.split())
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
    measure = sweep.run_row

    def interrupted(*positional, **settings) -> Record:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(*positional, **settings)

    monkeypatch.setattr(sweep, "run_row", interrupted)
    assert cli.main(arguments) == 130
    file = tmp_path / "d" / "records.jsonl"
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"interrupted; 2 finished rows are in {file}\n"
    assert [(record.task, record.temperature) for record in records.read(file)] == ROWS[:2]
    assert not (tmp_path / "d" / "report.md").exists()


def test_its_rows_are_those_of_the_shipped_pairs_table() -> None:
    table = {experiment(row): read_row(row) for row in sweep.rows("2")}
    found = demo.rows(seed=3)
    assert [(config.task, config.temperature) for config in found.values()] == ROWS
    for name, config in found.items():
        assert config == dataclasses.replace(table[name], rounds=2, seed=3)


def test_loops_that_differ_are_admitted() -> None:
    differs = PromptTrace(
        "a [bold] text", [Line(" a", "", "", 1)], Result("", [], 1, 1, [1], [1]), False, []
    )
    same = dataclasses.replace(differs, same_tokens=True)
    text = printed(demo.show, [made.record(), made.record()], [differs, same])
    assert "for the first prompt of 1 of 2 rows" in text
    assert "debian_ende, T = 0, γ = 6: 0 tokens in 1 target calls" in text
    assert "a [bold] text" in text and "  1  1/6 │ a\n" in text
    for value in ("the_target", "the_draft", "a processor, 2 cores", "abc1234", "0.10.2"):
        assert value in text
