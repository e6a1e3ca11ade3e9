"""The demo: measures, traces and reports the bundled pair's rows of Tables 2 and 4."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from speculative import disk, loading, progress
from speculative.drafts import named
from speculative.pair import Pair, Request
from speculative.reporting import page, tables, traces
from speculative.reporting.traces import PromptTrace
from speculative.rows import memory, records, weights
from speculative.rows.config import RowConfig
from speculative.rows.records import Record
from speculative.studies import sweep
from speculative.tasks.prompts import load_prompts

ROUNDS = 2  # Timings per example, fewer than in the table, to be short.


def rows(**settings: Any) -> dict[str, RowConfig]:
    """The bundled pair's rows of Table 2 by name, with changed fields of `RowConfig`."""
    return {
        name: dataclasses.replace(config, rounds=ROUNDS, **settings)
        for name, config in sweep.shipped_rows("2").items()
    }


def run(output_dir: pathlib.Path, target: str, draft: str | None, **settings: Any) -> None:
    """Measures and prints; writes reports, traces and, row by row, `records.jsonl`.

    Files of an earlier run in the output folder are replaced. `loading.resolve` describes target
    and draft; `settings` are other fields of every row's `RowConfig`. A KeyboardInterrupt says how
    many rows are finished and where they are.
    """
    paper_draft = "small"
    if draft and named.known(draft):
        paper_draft = draft if draft in ("unigram", "bigram") else None
    draft = loading.default_draft(target) if draft is None else draft
    configs = rows(target=target, draft=draft, paper_draft=paper_draft, **settings)
    load, first = weights.Loader(), next(iter(configs.values()))
    memory.require(first, load.resolve(first).configs)
    with progress.bar("the pair") as on_progress:
        on_progress("loading", 0)
        pair = load(first)
    file, report = output_dir / "records.jsonl", output_dir / "report.md"
    disk.writable(report)
    page_file = output_dir / "report.html"
    files = file, report, page_file, output_dir / traces.FILE
    earlier = [*files, *(output_dir / "rows" / name for name in configs)]
    try:
        measured, traced = sweep.run(configs, output_dir, load, earlier), []
        with progress.bar("the first text of each row") as on_progress:
            for number, config in enumerate(configs.values()):
                on_progress("tracing", number / len(configs))
                traced.append(_first(pair, config))
        traces.keep(output_dir, dict(zip(configs, traced, strict=True)))
    except KeyboardInterrupt:
        finished = len(records.read(file))
        raise KeyboardInterrupt(f"; {finished} finished rows are in {file}") from None
    try:
        with disk.written(report) as part, part.open("w", encoding="utf-8") as opened:
            opened.write("# Speculative decoding, measured\n\n```text\n")
            show(measured, traced, tables.console(opened, width=100))
            opened.write("```\n")
        page.write([output_dir], page_file)
    finally:
        show(measured, traced, tables.CONSOLE)
    tables.CONSOLE.print(f"Written: {file}, {report} and {page_file}.", soft_wrap=True)


def _first(pair: Pair, config: RowConfig) -> PromptTrace:
    """Traces a row's first text, as wide as its widest, so that no other program is compiled."""
    texts = [prompt.source for prompt in load_prompts(config.texts, config.num_examples)]
    vocabulary, gamma = pair.vocabulary, config.gamma or sweep.GAMMA
    decoding = config.decoding(vocabulary.size, gamma, vocabulary.eos_ids)
    inputs = pair.encode(texts)[:1]
    return traces.trace(pair, texts[0], Request(inputs, decoding, config.seed))


def show(measured: Sequence[Record], traced: Sequence[PromptTrace], console: Console) -> None:
    """Prints the rows' environment, traces and tables, and how many traces have equal tokens."""
    for name in tables.ENVIRONMENT:
        if (value := getattr(measured[0], name)) is not None:
            console.print(f"{name}: {value}", markup=False)
    for record, trace in zip(measured, traced, strict=True):
        console.print(
            f"\n{record.task}, T = {record.temperature:g}, γ = {record.gamma}: "
            f"{len(trace.result.tokens)} tokens in {trace.result.target_calls} target calls",
            style="bold",
        )
        traces.show(trace, record.gamma, console)
    console.print()
    tables.show_records(measured, console)
    console.print(
        "The traced loop (step by step on the host, float64) and the fast path emit the same "
        f"tokens for the first prompt of {sum(trace.same_tokens for trace in traced)} of "
        f"{len(traced)} rows."
    )
