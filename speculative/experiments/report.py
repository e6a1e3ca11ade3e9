"""What a set of rows shows: the paper's Tables 2 and 4, quality, exactness, traces, in words.

The terminal's tables and the report's Markdown come from the same columns.
"""

import dataclasses
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from speculative.experiments import traces
from speculative.experiments.records import Record
from speculative.experiments.run import Row
from speculative.experiments.traces import PromptTrace


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: its head, a record's entry, and what it means."""

    head: str
    entry: Callable[[Record], str]
    meaning: str


def _number(digits: int, *names: str) -> Callable[[Record], str]:
    """An entry of one or more fields of a record; a dash for what was not measured."""

    def entry(record: Record) -> str:
        values = [getattr(record, name) for name in names]
        return "–".join("" if v is None else f"{v:.{digits}f}" for v in values) or "–"

    return entry


SPEEDUPS = (
    Column("task", lambda r: r.task, "what is decoded, batch size 1"),
    Column("T", _number(0, "temperature"), "temperature; 0 is argmax"),
    Column("γ", _number(0, "gamma"), "guesses a step, chosen from α, c and v"),
    Column("α", _number(2, "alpha"), "acceptance rate: mean Σ min(p, q) on the target's own text"),
    Column("c", _number(3, "c"), "time of a draft step over that of a target step"),
    Column("v", _number(2, "verify_cost"), "time of a pass over γ + 1 positions over that of one"),
    Column(
        "tokens /call", _number(2, "tokens_per_call"), "tokens a target pass yielded (Equation 1)"
    ),
    Column("3.8", _number(2, "speedup_expected"), "speed-up by Theorem 3.8, where v is 1"),
    Column("predicted", _number(2, "speedup_predicted"), "speed-up from the measured costs"),
    Column("measured", _number(2, "speedup"), "autoregressive time over speculative time"),
    Column("95%", _number(2, "speedup_low", "speedup_high"), "its interval over the examples"),
    Column("paper α", _number(2, "paper_alpha"), "T5-XXL and T5-small in the paper"),
    Column("paper", _number(1, "paper_speedup"), "their speed-up, on a TPU-v4"),
)
"""Tables 2 and 4."""

QUALITY = (
    Column("task", lambda r: r.task, ""),
    Column("T", _number(0, "temperature"), ""),
    Column("metric", lambda r: r.metric or "–", ""),
    Column("autoregressive", _number(1, "quality_autoregressive"), ""),
    Column("speculative", _number(1, "quality_speculative"), ""),
)
"""BLEU and ROUGE against the references, of both outputs."""


def table(columns: Sequence[Column], records: Sequence[Record], title: str) -> Table:
    """Records as a table for the terminal."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        shown.add_column(column.head, justify="right" if number else "left", no_wrap=number == 0)
    for record in records:
        shown.add_row(*(column.entry(record) for column in columns))
    return shown


def markdown_table(columns: Sequence[Column], records: Sequence[Record]) -> str:
    """Records as a table in Markdown."""
    rows = [[column.head for column in columns]]
    rows.append([":--" if number == 0 else "--:" for number in range(len(columns))])
    rows += [[column.entry(record) for column in columns] for record in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def exactness(rows: Sequence[Row], traced: Sequence[PromptTrace]) -> list[str]:
    """What was checked, a sentence each: greedy outputs equal, and both loops agree."""
    sentences = []
    for row in rows:
        if row.record.outputs_identical is None:
            continue
        sentences.append(
            f"{row.record.task}, T = 0: {row.record.outputs_identical} of "
            f"{row.record.num_examples} outputs identical to autoregressive decoding."
        )
        for number, difference in enumerate(row.differences, 1):
            if difference is not None:
                cause = "a near tie" if difference.near_tie else "NOT EXPLAINED by rounding"
                sentences.append(
                    f"Prompt {number} differs from token {difference.position + 1} on, where the "
                    f"two logits are {difference.margin:.1e} apart: {cause}."
                )
    same = sum(trace.same_tokens for trace in traced)
    sentences.append(
        f"{same} of {len(traced)} traced generations (each task and temperature, first prompt): "
        "the reference loop, Algorithm 1 on the host in float64, emitted the same tokens."
    )
    return sentences


def show(rows: Sequence[Row], traced: Sequence[PromptTrace], console: Console) -> None:
    """Prints tables, greedy traces and the exactness check."""
    coloured = console.color_system is not None and not console.no_color
    all_records = [row.record for row in rows]
    console.print(table(SPEEDUPS, all_records, TITLE), "")
    console.print(table(QUALITY, all_records, "Quality of the outputs (percent)"), "")
    for trace in traced:
        if trace.record.temperature == 0:
            console.print(heading(trace), traces.legend(coloured), sep="\n", soft_wrap=True)
            console.print(traces.render(trace.lines, trace.record.gamma, coloured), "")
    console.print("Exactness", *exactness(rows, traced), sep="\n", highlight=False)


TITLE = "Tables 2 and 4 of the paper, for this pair (batch size 1)"


def heading(trace: PromptTrace) -> str:
    """What a trace is of."""
    record, result = trace.record, trace.result
    return (
        f"{record.task}, T = {record.temperature:g}, γ = {record.gamma}: {len(result.tokens)} "
        f"tokens in {result.target_calls} target calls"
    )


def markdown(rows: Sequence[Row], traced: Sequence[PromptTrace]) -> str:
    """The whole report."""
    all_records = [row.record for row in rows]
    first = all_records[0]
    parts = [
        "# Speculative decoding, measured",
        f"## {TITLE}",
        markdown_table(SPEEDUPS, all_records),
        "\n".join(f"- {column.head}: {column.meaning}" for column in SPEEDUPS),
        "## Quality of the outputs (percent)",
        markdown_table(QUALITY, all_records),
        "## Exactness",
        "\n".join(f"- {sentence}" for sentence in exactness(rows, traced)),
        "## Traces",
        f"A line a step, as in Figure 1 of the paper: {traces.legend(coloured=False)}.",
    ]
    for trace in traced:
        shown = traces.render(trace.lines, trace.record.gamma, coloured=False)
        parts += [f"### {heading(trace)}", f"```text\n{trace.source}\n\n{shown}\n```"]
    parts += ["## Environment", environment(first)]
    return "\n\n".join(parts) + "\n"


def environment(record: Record) -> str:
    """Where and with what a record was measured, as a list in Markdown."""
    return "\n".join(
        f"- {name}: {getattr(record, name)}"
        for name in ("target", "draft", "device", "dtype", "jax_version", "commit", "seed", "started_at")
    )
