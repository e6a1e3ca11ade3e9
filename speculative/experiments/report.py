"""What a set of rows shows: the paper's Tables 2 and 4, quality, exactness, traces, in words.

The terminal's tables and the report's Markdown come from the same columns.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from speculative.experiments import traces
from speculative.experiments.figures import TheoryCheck
from speculative.experiments.records import Record
from speculative.experiments.run import Row
from speculative.experiments.traces import PromptTrace
from speculative.experiments.tuning import Tuning
from speculative.measurement.independence import Independence
from speculative.theory import expected_tokens

Entry = TypeVar("Entry")
"""What a line of a table shows: a record, or a row of theory."""


@dataclasses.dataclass(frozen=True)
class Column(Generic[Entry]):
    """A column of a table: its head, a record's entry, and what it means."""

    head: str
    entry: Callable[[Entry], str]
    meaning: str


def _number(name: str, digits: int) -> Callable[[Any], str]:
    """The entry of a field; a dash where it was not measured."""

    def entry(record: Any) -> str:
        value = getattr(record, name)
        return "–" if value is None else f"{value:.{digits}f}"

    return entry


def _interval(name: str, digits: int) -> Callable[[Any], str]:
    """The entry of a field's interval; a dash where it was not measured."""

    def entry(record: Any) -> str:
        low, high = (getattr(record, f"{name}_{end}") for end in ("low", "high"))
        return "–" if low is None else f"{low:.{digits}f}–{high:.{digits}f}"

    return entry


def _measured(record: Record) -> str:
    return f"{record.speedup:.2f}\n{_interval('speedup', 2)(record)}"


def _quality(record: Record) -> str:
    plain, guessed = record.quality_autoregressive, record.quality_speculative
    if plain is None or guessed is None:
        return "–"
    return f"{record.metric} {plain:.1f} / {guessed:.1f}"


TITLE = "Tables 2 and 4 of the paper for this pair, batch size 1"

SPEEDUPS: tuple[Column[Record], ...] = (
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

QUALITY: tuple[Column[Record], ...] = (
    Column("task", lambda r: r.task, "what is decoded"),
    Column("T", _number("temperature", 0), "temperature"),
    Column("metric", lambda r: r.metric or "–", "against the references, in percent"),
    Column("autoregressive", _number("quality_autoregressive", 1), "of the target's own outputs"),
    Column("speculative", _number("quality_speculative", 1), "of the speculative outputs"),
)

THEORY: tuple[Column[TheoryCheck], ...] = (
    Column("α", _number("alpha", 1), "acceptance rate"),
    Column("γ", _number("gamma", 0), "guesses a step"),
    Column("operations", _number("operations", 2), "growth by Theorem 3.11, draft free"),
    Column("paper", _number("operations_printed", 2), "the same, as printed"),
    Column("speed-up", _number("speedup", 2), "by Theorem 3.8, draft free"),
    Column("paper", _number("speedup_printed", 2), "the same, as printed"),
)
"""Of Table 1, whose rows `figures.table_1` computes."""


def _place(record: Record) -> str:
    """A row's file, and its target where that is no trained one."""
    name = record.experiment.rpartition("/")[2]
    return f"{name}, random weights" if "random weights" in record.target else name


def _with_flag(record: Record) -> str:
    return f"{record.speedup:.2f}" + (" !" if record.above_ceiling else "")


ROW = Column[Record]("row", _place, "its gin file")

ACCEPTANCE: tuple[Column[Record], ...] = (
    Column("γ", _number("gamma", 0), "guesses a step"),
    Column("α", _number("alpha", 2), "acceptance rate on the target's own text"),
    Column("paper", _number("paper_alpha", 2), "the paper's α"),
    Column("accepted", _number("alpha_accepted", 2), "guesses accepted over guesses tested"),
    Column("c", _number("c", 3), "time of a guess over that of a target step"),
    Column("v", _number("verify_cost", 2), "time of verifying over that of a target step"),
    Column("per call", _number("tokens_per_call", 2), "tokens that a target pass yielded"),
)
LENIENT: tuple[Column[Record], ...] = (
    Column("l", lambda r: f"{r.lenience:g}", "lenience; below 1 outputs are not the target's own"),
    *ACCEPTANCE[:2],
    Column("α 95%", _interval("alpha", 2), "its interval over the examples"),
    *ACCEPTANCE[2:4],
    Column("accepted 95%", _interval("alpha_accepted", 2), "its interval over the examples"),
    *ACCEPTANCE[4:],
)
"""`ACCEPTANCE` where a row is lenient (A.5)."""

SPEED: tuple[Column[Record], ...] = (
    Column("expected", _number("speedup_expected", 2), "speed-up by Theorem 3.8"),
    Column("predicted", _number("speedup_predicted", 2), "speed-up from all measured costs"),
    Column("measured", _with_flag, "speed-up; ! is above Eq. 1's ceiling: a slow baseline"),
    Column("95%", _interval("speedup", 2), "its interval over the examples"),
    Column("paper", _number("paper_speedup", 1), "the paper's measured speed-up"),
)
RATED = Column[Record]("quality", _quality, "of plain and of speculative outputs, in percent")
"""Of a table of the paper, rerun: ours beside the paper's."""

UNLIKELY = 0.01
"""A p-value below which acceptances are said not to be independent and alike."""

SIMULATED = "simulated acceptance: only the times are real, outputs mean nothing"


def acceptance(records: Sequence[Record]) -> tuple[Column[Record], ...]:
    """The columns of acceptance that these rows need."""
    return LENIENT if any(record.lenience < 1 for record in records) else ACCEPTANCE


def table(columns: Sequence[Column[Entry]], records: Sequence[Entry], title: str) -> Table:
    """Records as a table for the terminal."""
    shown = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    for number, column in enumerate(columns):
        shown.add_column(column.head, justify="right" if number else "left")
    for record in records:
        shown.add_row(*(column.entry(record) for column in columns))
    return shown


def markdown_table(columns: Sequence[Column[Entry]], records: Sequence[Entry]) -> str:
    """Records as a table in Markdown, and what its columns mean."""
    rows = [[column.head for column in columns]]
    rows.append([":--" if number == 0 else "--:" for number in range(len(columns))])
    rows += [[column.entry(record) for column in columns] for record in records]
    lines = ["| " + " | ".join(row).replace("\n", " ") + " |" for row in rows]
    return "\n".join([*lines, "", meanings(columns)])


def meanings(columns: Sequence[Column[Any]]) -> str:
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


def show_records(records: Sequence[Record], console: Console) -> None:
    """Prints rows beside the paper's."""
    if any(record.simulated_alpha is not None for record in records):
        console.print(f"This is {SIMULATED}.", style="bold", soft_wrap=True)
    columns = acceptance(records)
    console.print(table((ROW, *columns), records, "Batch size 1, beside the paper"))
    console.print()
    console.print(table((ROW, *SPEED, RATED), records, ""))
    console.print(meanings((*columns, *SPEED, RATED)), style="dim", highlight=False)
    for record in records:
        if record.outputs_identical is not None:
            console.print(
                f"{record.experiment}: {record.outputs_identical} of {record.num_examples} greedy "
                f"outputs are identical, {record.near_ties} part at a near tie.",
                highlight=False,
            )


def show_tuning(tuning: Tuning, steps: Independence, console: Console) -> None:
    """Prints the speed-up over gamma, what is best or why nothing is, and what a gamma could be."""
    costs = tuning.costs
    console.print(
        f"α = {tuning.alpha:.3f} on {len(tuning.lengths)} outputs of "
        f"{sum(tuning.lengths) / len(tuning.lengths):.0f} tokens; a target step takes "
        f"{costs.ms_target_step:.2f} ms, prefill {costs.ms_prefill_target:.1f} + "
        f"{costs.ms_prefill_draft:.1f} ms.",
        highlight=False,
    )
    shown = Table(box=None, pad_edge=False)
    for head in ("γ", "c", "v", "Theorem 3.8", "predicted"):
        shown.add_column(head, justify="right")
    for gamma in tuning.gammas:
        best = "bold" if gamma == tuning.gamma else None
        numbers = (costs.c(gamma), costs.verify_cost(gamma))
        speedups = (tuning.expected(gamma), tuning.predicted(gamma))
        cells = [f"{numbers[0]:.3f}", *(f"{value:.2f}" for value in (numbers[1], *speedups))]
        shown.add_row(str(gamma), *cells, style=best)
    console.print(shown)
    reason = tuning.why_not()
    if reason is None:
        console.print(
            f"Best: γ = {tuning.gamma}, {tuning.predicted(tuning.gamma):.2f} times as fast as "
            f"plain decoding. The target's weights are read "
            f"{expected_tokens(tuning.alpha, tuning.gamma):.2f} times less often, operations grow "
            f"{tuning.operations:.2f} times (Theorem 3.11).",
            highlight=False,
        )
    else:
        console.print(f"Speculation will not pay here. {reason}", highlight=False)
    fit = ""
    if steps.p_value is not None:
        holds = "fit one rate" if steps.p_value >= UNLIKELY else "do not fit one rate"
        fit = f"Acceptances {holds} at every place of a step (p = {steps.p_value:.2g}). "
    console.print(
        f"{fit}An oracle's gamma would yield {steps.oracle_tokens:.2f} tokens a target pass, "
        f"{steps.oracle_headroom:.2f} times what gamma = {tuning.gamma} does (section 3.5).",
        highlight=False,
    )


def show_theory(checks: Sequence[TheoryCheck], console: Console) -> None:
    """Prints Table 1, computed and as the paper has it."""
    console.print(table(THEORY, checks, "Table 1, computed and printed"))
    console.print(meanings(THEORY), style="dim", highlight=False)
