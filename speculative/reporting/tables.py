"""Tables for the terminal, and the columns that they share with the HTML page."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from speculative import paper, theory
from speculative.measurement.independence import Independence
from speculative.rows import memory, weights
from speculative.rows.config import RowConfig
from speculative.rows.records import Record
from speculative.studies.tune import Tuning

CONSOLE = Console()
"""Standard output."""

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


def _quality(record: Record) -> str:
    alone, guessed = record.quality_autoregressive, record.quality_speculative
    return "–" if None in (alone, guessed) else f"{record.metric} {alone:.1f}/{guessed:.1f}"


THEORY: tuple[Column[paper.TheoryRow], ...] = (
    Column("α", _number("alpha", 1), "acceptance rate"),
    Column("γ", _number("gamma", 0), "guesses a step"),
    Column(
        "operations",
        lambda row: f"{theory.operations(row.alpha, row.gamma, 0.0):.2f}",
        "growth by Theorem 3.11, draft free",
    ),
    Column("paper", _number("operations", 2), "the same, as printed"),
    Column(
        "speed-up",
        lambda row: f"{theory.speedup(row.alpha, row.gamma, 0.0):.2f}",
        "by Theorem 3.8, draft free",
    ),
    Column("paper", _number("speedup", 2), "the same, as printed"),
)
"""Of Table 1, computed and as printed."""


def _row_name(record: Record) -> str:
    """A row's name without its table's, and whether its weights are random."""
    name = record.experiment.rpartition("/")[2]
    return f"{name}, random weights" if "random weights" in record.target else name


ROW = Column[Record]("row", _row_name, "its name in its table")

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
    Column(
        "measured",
        lambda r: f"{r.speedup:.2f}" + " !" * r.above_ceiling,
        "speed-up; ! is above Eq. 1's ceiling: a slow baseline",
    ),
    Column("95%", _interval("speedup", 2), "its interval over the examples"),
    Column("paper", _number("paper_speedup", 1), "the paper's measured speed-up"),
    Column("quality", _quality, "of autoregressive and of speculative outputs, in percent"),
)

EXACTNESS: tuple[Column[Record], ...] = (
    Column(
        "identical",
        lambda r: f"{r.outputs_identical} of {r.num_examples}",
        "greedy outputs that are those of autoregressive decoding, token for token",
    ),
    Column(
        "near ties",
        lambda r: str(r.near_ties),
        "outputs that part where the target's two best logits lie closer than rounding can tell",
    ),
    Column(
        "unexplained",
        lambda r: str(r.num_examples - (r.outputs_identical or 0) - (r.near_ties or 0)),
        "outputs that part elsewhere, which would be a fault",
    ),
)

ENVIRONMENT = ("target", "draft", "device", "dtype", "jax_version", "commit", "seed", "started_at")
"""Fields of a record that tell where and with what it was measured."""

UNLIKELY = 0.01
"""A p-value below which acceptances are said not to be i.i.d."""

SIMULATED = "simulated acceptance: only the times are real, outputs mean nothing"


def acceptance(records: Sequence[Record]) -> tuple[Column[Record], ...]:
    """The columns of acceptance that these rows need."""
    return LENIENT if any(record.lenience < 1 for record in records) else ACCEPTANCE


def table(columns: Sequence[Column[Entry]], records: Sequence[Entry]) -> Table:
    """Records as a table for the terminal."""
    cells = [[column.entry(record) for column in columns] for record in records]
    return grid([column.head for column in columns], cells)


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Cells as a table for the terminal."""
    shown = Table(box=None, pad_edge=False, collapse_padding=True, title=title)
    for number, head in enumerate(heads):
        shown.add_column(head, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def meanings(columns: Sequence[Column[Any]]) -> str:
    """A list of what columns mean, in Markdown."""
    return "\n".join(f"- {column.head}: {column.meaning}" for column in columns)


def show_records(records: Sequence[Record], console: Console = CONSOLE) -> None:
    """Prints rows beside the paper's, and how many greedy outputs are equal."""
    if any(record.simulated_alpha is not None for record in records):
        console.print(f"This is {SIMULATED}.", style="bold", soft_wrap=True)
    parts = [(acceptance(records), records), (SPEED, records)]
    compared = [record for record in records if record.outputs_identical is not None]
    if compared:
        parts.append((EXACTNESS, compared))
    for columns, shown in parts:
        console.print(table((ROW, *columns), shown))
        console.print()
    for columns, _ in parts:
        console.print(meanings(columns), style="dim", highlight=False)


def show_tuning(tuning: Tuning, steps: Independence, console: Console = CONSOLE) -> None:
    """Prints the speed-up over gamma, the best gamma or why none pays, and what an oracle gains."""
    costs = tuning.costs
    console.print(
        f"α = {tuning.alpha:.3f} on {len(tuning.lengths)} outputs of "
        f"{sum(tuning.lengths) / len(tuning.lengths):.0f} tokens; a target step takes "
        f"{costs.ms_target_step:.2f} ms, prefill {costs.ms_prefill_target:.1f} + "
        f"{costs.ms_prefill_draft:.1f} ms.",
        highlight=False,
    )
    cells = []
    for gamma in tuning.gammas:
        factors = (costs.verify_cost(gamma), tuning.expected(gamma), tuning.predicted(gamma))
        cells.append([str(gamma), f"{costs.c(gamma):.3f}", *(f"{value:.2f}" for value in factors)])
    shown = grid(("γ", "c", "v", "Theorem 3.8", "predicted"), cells)
    shown.rows[tuning.gammas.index(tuning.gamma)].style = "bold"
    console.print(shown)
    reason = tuning.why_not()
    if reason is None:
        console.print(
            f"Best: γ = {tuning.gamma}, {tuning.predicted(tuning.gamma):.2f} times as fast as "
            f"autoregressive decoding. The weights of the target are read "
            f"{tuning.rule.expected_tokens(tuning.alpha, tuning.gamma):.2f} times less often, "
            f"operations grow {tuning.operations:.2f} times (Theorem 3.11).",
            highlight=False,
        )
    else:
        console.print(f"Speculation will not pay here. {reason}", highlight=False)
    fit = ""
    if steps.p_value is not None:
        holds = "fit one rate" if steps.p_value >= UNLIKELY else "do not fit one rate"
        fit = f"Acceptances {holds} at every position of a step (p = {steps.p_value:.2g}). "
    console.print(
        f"{fit}An oracle's gamma would yield {steps.oracle_tokens:.2f} tokens a target pass, "
        f"{steps.oracle_headroom:.2f} times what gamma = {tuning.gamma} does (section 3.5).",
        highlight=False,
    )


def show_memory(
    config: RowConfig, present: bool, source_length: int, console: Console = CONSOLE
) -> bool:
    """Prints what a row needs, and tells whether a TPU v4, or the present device, has it.

    Raises:
        ValueError: as `weights.sizes`.
    """
    found = memory.needs(config, weights.sizes(config), source_length)
    heads = ("model", "parameters", "dtype", "weights", "caches", "activations", "all")
    cells = []
    for need in found:
        parts = (need.weights, need.caches, need.activations, need.total)
        cells.append((need.name, f"{need.parameters:,}", need.dtype, *map(_amount, parts)))
    title = f"Memory at batch size 1, sources of {source_length} tokens"
    console.print(grid(heads, cells, title))
    total = sum(need.total for need in found)
    name, there = memory.device_bytes() if present else ("a TPU v4", memory.TPU_V4)
    word = "fits on" if total <= there else "does NOT fit on"
    console.print(f"{_amount(total)} {word} {name}, which has {_amount(there)}.", highlight=False)
    return total <= there


def _amount(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def show_theory(console: Console = CONSOLE) -> None:
    """Prints Table 1, computed and as the paper has it."""
    console.print(table(THEORY, paper.TABLE_1))
    console.print(meanings(THEORY), style="dim", highlight=False)
