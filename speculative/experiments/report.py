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


def _number(name: str, digits: int) -> Callable[[Record], str]:
    """The entry of a field; a dash where it was not measured."""

    def entry(record: Record) -> str:
        value = getattr(record, name)
        return "–" if value is None else f"{value:.{digits}f}"

    return entry


def _measured(record: Record) -> str:
    return f"{record.speedup:.2f}\n{record.speedup_low:.2f}–{record.speedup_high:.2f}"


TITLE = "Tables 2 and 4 of the paper for this pair, batch size 1"

SPEEDUPS = (
    Column("task", lambda r: r.task, "what is decoded"),
    Column("T", _number("temperature", 0), "temperature; 0 is argmax"),
    Column("γ", _number("gamma", 0), "guesses a step, chosen for the measured α, c and v"),
    Column("α", _number("alpha", 2), "acceptance rate: mean Σ min(p, q) on the target's text"),
    Column("c", _number("c", 2), "time of a guess over that of a target step"),
    Column(
        "v", _number("verify_cost", 2), "time of verifying γ guesses over that of a target step"
    ),
    Column("per\ncall", _number("tokens_per_call", 2), "tokens that a target pass yielded"),
    Column("expected", _number("speedup_expected", 2), "speed-up by Theorem 3.8, where v is 1"),
    Column("predicted", _number("speedup_predicted", 2), "speed-up from all measured costs"),
    Column("measured", _measured, "autoregressive over speculative time, with its 95% interval"),
    Column("paper\nα", _number("paper_alpha", 2), "of T5-XXL and T5-small, on a like task"),
    Column("paper", _number("paper_speedup", 1), "their measured speed-up, on a TPU-v4"),
)

QUALITY = (
    Column("task", lambda r: r.task, "what is decoded"),
    Column("T", _number("temperature", 0), "temperature"),
    Column("metric", lambda r: r.metric or "–", "against the references, in percent"),
    Column("autoregressive", _number("quality_autoregressive", 1), "of the target's own outputs"),
    Column("speculative", _number("quality_speculative", 1), "of the speculative outputs"),
)


def table(columns: Sequence[Column], records: Sequence[Record], title: str) -> Table:
    """Records as a table for the terminal."""
    shown = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    for number, column in enumerate(columns):
        shown.add_column(column.head, justify="right" if number else "left")
    for record in records:
        shown.add_row(*(column.entry(record) for column in columns))
    return shown


def markdown_table(columns: Sequence[Column], records: Sequence[Record]) -> str:
    """Records as a table in Markdown, and what its columns mean."""
    rows = [[column.head for column in columns]]
    rows.append([":--" if number == 0 else "--:" for number in range(len(columns))])
    rows += [[column.entry(record) for column in columns] for record in records]
    lines = ["| " + " | ".join(row).replace("\n", " ") + " |" for row in rows]
    return "\n".join([*lines, "", meanings(columns)])


def meanings(columns: Sequence[Column]) -> str:
    """A list of what columns mean, in Markdown."""
    heads = [column.head.replace("\n", " ") for column in columns]
    pairs = zip(heads, columns, strict=True)
    return "\n".join(f"- {head}: {column.meaning}" for head, column in pairs)


def exactness(rows: Sequence[Row], traced: Sequence[PromptTrace]) -> list[str]:
    """What was checked, a sentence each: greedy outputs are equal, and both loops agree."""
    sentences = []
    for row in rows:
        record = row.record
        if record.outputs_identical is None:
            continue
        sentences.append(
            f"{record.task}, T = 0: {record.outputs_identical} of {record.num_examples} outputs "
            "are identical to autoregressive decoding."
        )
        for number, difference in enumerate(row.differences, 1):
            if difference is not None:
                cause = "a near tie" if difference.near_tie else "NOT explained by rounding"
                sentences.append(
                    f"{record.task}, T = 0, prompt {number}: the outputs part at token "
                    f"{difference.position + 1}, whose two candidates lie {difference.margin:.1e} "
                    f"apart in the target's logits: {cause}."
                )
    same = sum(trace.same_tokens for trace in traced)
    sentences.append(
        f"Reference loop (Algorithm 1 on the host, float64) and fast path, first prompt of each "
        f"row: the same tokens in {same} of {len(traced)}."
    )
    return sentences


def show(rows: Sequence[Row], traced: Sequence[PromptTrace], console: Console) -> None:
    """Prints the tables, the greedy traces and the exactness check."""
    coloured = console.color_system is not None and not console.no_color
    records = [row.record for row in rows]
    console.print(table(SPEEDUPS, records, TITLE))
    console.print(meanings(SPEEDUPS[2:]), style="dim", highlight=False)
    console.print()
    console.print(table(QUALITY, records, "Quality against the references, in percent"))
    for row, trace in zip(rows, traced, strict=True):
        if row.record.temperature == 0:
            console.print()
            console.print(heading(row.record, trace), style="bold", highlight=False)
            console.print(trace.source, style="dim", highlight=False, markup=False)
            console.print(traces.legend(coloured))
            console.print(traces.render(trace.lines, row.record.gamma, coloured))
    console.print()
    for sentence in exactness(rows, traced):
        console.print(sentence, highlight=False)


def heading(record: Record, trace: PromptTrace) -> str:
    """What a trace is of."""
    return (
        f"{record.task}, T = {record.temperature:g}, γ = {record.gamma}: "
        f"{len(trace.result.tokens)} tokens in {trace.result.target_calls} target calls"
    )


def markdown(rows: Sequence[Row], traced: Sequence[PromptTrace]) -> str:
    """The whole report."""
    records = [row.record for row in rows]
    parts = [
        "# Speculative decoding, measured",
        f"## {TITLE}",
        markdown_table(SPEEDUPS, records),
        "## Quality",
        markdown_table(QUALITY, records),
        "## Exactness",
        "\n".join(f"- {sentence}" for sentence in exactness(rows, traced)),
        "## Traces",
        f"A line a step, as in Figure 1 of the paper: {traces.legend(coloured=False)}.",
    ]
    for row, trace in zip(rows, traced, strict=True):
        lines = traces.render(trace.lines, row.record.gamma, coloured=False)
        parts += [f"### {heading(row.record, trace)}", f"```text\n{trace.source}\n\n{lines}\n```"]
    parts += ["## Environment", environment(records[0])]
    return "\n\n".join(parts) + "\n"


ENVIRONMENT = ("target", "draft", "device", "dtype", "jax_version", "commit", "seed", "started_at")


def environment(record: Record) -> str:
    """Where and with what a record was measured, as a list in Markdown."""
    return "\n".join(f"- {name}: {getattr(record, name)}" for name in ENVIRONMENT)
