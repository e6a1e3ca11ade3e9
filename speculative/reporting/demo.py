"""The demo: the shipped pair's rows of Tables 2 and 4, measured, traced and reported."""

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence

from rich.console import Console

from speculative import loading
from speculative.drafts.named import MODEL_FREE
from speculative.reporting import tables, traces
from speculative.reporting.traces import PromptTrace
from speculative.rows import memory, weights
from speculative.rows.config import RowConfig
from speculative.rows.records import Record
from speculative.studies import sweep
from speculative.tasks.prompts import load_prompts

ROWS = {
    f"table2/{task}_t{temperature:g}": RowConfig(
        task=task,
        target="debian_target",
        draft="debian_draft",
        temperature=temperature,
        gamma=5,
        rounds=2,
    )
    for task in ("debian_ende", "debian_synopsis")
    for temperature in (0.0, 1.0)
}
"""Those of configs/runs/table2.gin, which an installed package does not have; but each example is
timed twice only, for the demo is to be short."""

PAPER_DRAFTS = {name: name if name in ("unigram", "bigram") else None for name in MODEL_FREE}
"""The paper's draft that is compared with one of ours; with a model, T5-small is."""


def run(
    target: str,
    draft: str | None,
    dtype: str | None,
    vocabulary_file: str | None,
    output_dir: pathlib.Path,
    seed: int,
    max_length: int,
    limit: int | None,
) -> None:
    """Measures and prints; writes `records.jsonl`, a row as soon as it is done, and `report.md`.

    The first four arguments are those of `loading.resolve`. Files of an earlier run in the output's
    folder are replaced. An output is cut at `max_length` tokens; `limit` is the prompts of each
    task, where None is all.

    Raises:
        ValueError: as `loading.resolve` and `sweep.run`.
        KeyboardInterrupt: says where the finished rows are.
    """
    changes = {
        "target": target,
        "draft": draft or loading.DRAFTS.get(target, "debian_draft"),
        "dtype": dtype,
        "vocabulary": vocabulary_file,
        "max_length": max_length,
        "num_examples": limit,
        "seed": seed,
        "paper_draft": PAPER_DRAFTS.get(draft or "", "small"),
    }
    configs = {name: dataclasses.replace(row, **changes) for name, row in ROWS.items()}
    load, first = weights.Loader(), next(iter(configs.values()))
    memory.require(first, load.resolve(first).configs)
    pair = load(first)
    file, report = output_dir / "records.jsonl", output_dir / "report.md"
    for old in (file, report):
        old.unlink(missing_ok=True)
    for name in configs:
        shutil.rmtree(output_dir / "rows" / name, ignore_errors=True)
    try:
        records, traced = sweep.run(configs, output_dir, load), []
        for config in configs.values():
            source = load_prompts(config.task, 1)[0].source
            traced.append(traces.trace(pair, source, config, config.gamma or sweep.GAMMA))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; finished rows are in {file}") from None
    console = tables.CONSOLE
    show(records, traced, console)
    with report.open("w", encoding="utf-8") as opened:
        opened.write("# Speculative decoding, measured\n\n```text\n")
        show(records, traced, Console(file=opened, width=100))
        opened.write("```\n")
    console.print(f"Written: {file} and {report}.", soft_wrap=True)


def show(records: Sequence[Record], traced: Sequence[PromptTrace], console: Console) -> None:
    """Prints where the rows were measured, a trace and the tables of each, and what is equal."""
    for name in tables.ENVIRONMENT:
        console.print(f"{name}: {getattr(records[0], name)}", highlight=False, markup=False)
    for record, trace in zip(records, traced, strict=True):
        console.print(
            f"\n{record.task}, T = {record.temperature:g}, γ = {record.gamma}: "
            f"{len(trace.result.tokens)} tokens in {trace.result.target_calls} target calls",
            style="bold",
            highlight=False,
        )
        traces.show(trace, record.gamma, console)
    console.print()
    tables.show_records(records, console)
    console.print(
        "The reference loop (Algorithm 1 on the host, float64) and the fast path emit the same "
        f"tokens for the first prompt of {sum(trace.same_tokens for trace in traced)} of "
        f"{len(traced)} rows.",
        highlight=False,
    )
