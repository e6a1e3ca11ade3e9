"""Tables for the terminal, and the columns that they share with the HTML page."""

from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from speculative import paper, theory
from speculative.rows.categories import Category
from speculative.rows.records import Record
from speculative.studies.power import ENOUGH, Power
from speculative.studies.tune import Tuning


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console for standard output or a file, which prints names as they are, even [ and :."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


CONSOLE = console()  # Standard output.


class Column(NamedTuple):
    """A column of a table: its head, the text of a row's cell, and its meaning."""

    head: str
    cell: Callable[[Any], str]
    meaning: str = ""
    several: bool = False  # Whether a cell has several numbers, which several lines may show.


def field(name: str, spec: str = "", unit: float | None = None) -> Callable[[Any], str]:
    """The cell of a record's field, in a format and a unit; a dash where it was not measured."""

    def cell(record: Any) -> str:
        value = getattr(record, name)
        return "–" if value is None else format(value / unit if unit else value, spec)

    return cell


# Examples that a 95% interval needs. The range of fewer values misses the median of their
# distribution more than once in 20 times, and a bootstrap draws from no wider range.
FEWEST = 6


def thousandths(value: float) -> str:
    """A time or ratio with three decimals; one too small for them is not shown as 0."""
    return "<0.001" if value < 0.0005 else f"{value:.3f}"


def _interval(name: str, dash: str = "–") -> Callable[[Record], str]:
    """The cell of a field's interval; a dash where it was not measured, or on too few examples."""

    def cell(record: Record) -> str:
        low, high = (getattr(record, f"{name}_{end}") for end in ("low", "high"))
        few = record.num_examples < FEWEST
        return "–" if low is None or few else f"{low:.2f}{dash}{high:.2f}"

    return cell


def _draft_free(factor: Callable[[float, int, float], float]) -> Callable[[paper.TheoryRow], str]:
    return lambda row: f"{factor(row.alpha, row.gamma, 0.0):.2f}"


def _row_name(record: Record) -> str:
    """A row's name without its table's, and whether its weights are random."""
    name = record.experiment.rpartition("/")[2]
    return f"{name}, random weights" if "random weights" in record.target else name


THEORY = (  # Table 1, computed and as printed.
    Column("α", field("alpha", ".1f"), "acceptance rate"),
    Column("γ", field("gamma"), "guesses per step"),
    Column("operations", _draft_free(theory.operations), "growth by Theorem 3.11, draft free"),
    Column("paper", field("operations", ".2f"), "the same, as printed"),
    Column("speed-up", _draft_free(theory.speedup), "by Theorem 3.8, draft free"),
    Column("paper", field("speedup", ".2f"), "the same, as printed"),
)

ROW = Column("row", _row_name)

ACCEPTANCE = (
    Column("l", field("lenience", "g"), "lenience; below 1 outputs are not the target's own"),
    Column("γ", field("gamma"), "guesses per step, or the depth of a tree"),
    Column("tree", field("tree"), "guesses in a tree; 0 is a chain"),
    Column(
        "α",
        field("alpha", ".2f"),
        "acceptance rate on the target's own text; for trees, of the likeliest guesses",
    ),
    Column("α 95%", _interval("alpha"), "its interval over the examples"),
    Column("paper", field("paper_alpha", ".2f"), "the paper's α"),
    Column(
        "accepted",
        field("alpha_accepted", ".2f"),
        "guesses accepted over guesses tested, for trees once per level",
    ),
    Column("accepted 95%", _interval("alpha_accepted"), "its interval over the examples"),
    Column("c", lambda record: thousandths(record.c), "time of a guess over that of a target step"),
    Column("v", field("verify_cost", ".2f"), "time of verifying over that of a target step"),
    Column("per call", field("tokens_per_call", ".2f"), "tokens per target pass"),
)


def _of_rank(first: int, last: int | None = None) -> Callable[[Record], str]:
    """The share of tested positions at which a guess of these ranks, from 0, was accepted."""

    def cell(record: Record) -> str:
        accepted = [sum(row[first:last]) for row in record.accepted_by_rank or ()]
        return f"{sum(accepted) / max(1, sum(record.tested_by_position or ())):.3f}"

    return cell


RANKS = (  # For rows with trees.
    Column("first", _of_rank(0, 1), "tested positions whose likeliest guess was accepted"),
    Column("second", _of_rank(1, 2), "the guess after it"),
    Column("third", _of_rank(2, 3), "the next"),
    Column("fourth", _of_rank(3, 4), "the next"),
    Column("others", _of_rank(4), "any of the others"),
)

VERIFICATION = (  # For rows above temperature 0, where a rule verifies guesses together.
    Column("rule", field("verification"), "how guesses are verified"),
    Column("per call", field("tokens_per_call", ".2f"), "tokens per target pass"),
    Column("95%", _interval("tokens_per_call"), "its interval over the examples"),
    Column(
        "predicted", field("tokens_per_call_predicted", ".2f"), "the same, as predicted by the rule"
    ),
    Column(
        "over token",
        field("gain_over_token", ".3f"),
        "predicted tokens over those of token verification of the same guesses",
    ),
    Column("95%", _interval("gain_over_token"), "its interval over the examples"),
)

DRAFTS = (  # For rows with several drafts.
    Column("draft", field("draft"), "source of the guesses"),
    Column(
        "parameters",
        field("draft_parameters", ".2f", 1e6),
        "in millions; for a table, the numbers in it",
    ),
    Column("MB", field("draft_bytes", ".2f", 1e6), "memory that they take"),
    Column(
        "minutes",
        field("draft_training_minutes", ".0f"),
        "of training, if the checkpoint records them",
    ),
)

SPEED = (
    Column("expected", field("speedup_expected", ".2f"), "speed-up by Theorem 3.8"),
    Column("predicted", field("speedup_predicted", ".2f"), "speed-up from all measured costs"),
    Column(
        "measured",
        lambda r: f"{r.speedup:.2f}" + " !" * r.above_ceiling,
        "speed-up; ! is above the predicted tokens per call: a slow baseline",
    ),
    Column("95%", _interval("speedup"), f"its interval over the examples, if at least {FEWEST}"),
    Column("paper", field("paper_speedup", ".1f"), "the paper's measured speed-up"),
)

QUALITY = (  # For rows whose texts have references.
    Column("metric", field("metric"), "of outputs against references, in percent"),
    Column("autoregressive", field("quality_autoregressive", ".1f"), "of autoregressive outputs"),
    Column("speculative", field("quality_speculative", ".1f"), "of speculative outputs"),
    Column(
        "difference",
        field("quality_difference", "+.1f"),
        "speculative minus autoregressive; above temperature 0 both come from samples, which "
        "differ by chance: speculative verify tests whether they are the target's own",
    ),
    Column(
        "95%",
        _interval("quality_difference", " to "),
        "its interval over the examples; it excludes 0 for one in 20 rows without a difference",
    ),
)


def _by_position(one: Category) -> str:
    shares = ("–" if x is None else f"{x:.2f}".lstrip("0") for x in one.acceptance_by_position)
    return " ".join(shares)


CATEGORIES = (  # For a row whose texts are questions.
    Column("category", field("category"), "of questions; the last row has all of them"),
    Column("questions", field("questions"), "measured with all their turns"),
    Column(
        "accepted",
        field("mean_accepted_tokens", ".2f"),
        "tokens per target pass, including its own (mean accepted tokens of Spec-Bench, acceptance "
        "length of SPEED-Bench)",
    ),
    Column(
        "by position", _by_position, "guesses accepted at positions 1 to γ, of those tested", True
    ),
    Column(
        "alone",
        field("tokens_per_second_autoregressive", ".1f"),
        "tokens per second without a draft, over questions",
    ),
    Column("with draft", field("tokens_per_second", ".1f"), "the same with the draft"),
    Column("speed-up", field("speedup", ".2f"), "the ratio of the two, as in Spec-Bench"),
    Column(
        "95%",
        lambda one: (
            f"{one.speedup_low:.2f}–{one.speedup_high:.2f}" if one.questions >= FEWEST else "–"
        ),
        "its interval over the questions",
    ),
)

EXACTNESS = (  # For rows whose greedy outputs were compared.
    Column(
        "identical",
        lambda r: f"{r.outputs_identical} of {r.num_examples}",
        "greedy outputs that equal those of autoregressive decoding, token for token",
    ),
    Column(
        "near ties",
        field("near_ties"),
        "outputs that diverge where the target's two best logits are closer than rounding can tell",
    ),
    Column(
        "unexplained",
        lambda r: str(r.num_examples - r.outputs_identical - r.near_ties),
        "outputs that diverge elsewhere, which would be a fault",
    ),
)

# Fields of a record that describe where and with what it was measured.
ENVIRONMENT = ("target", "draft", "device", "mesh", "dtype", "quantize", "jax_version", "commit")
ENVIRONMENT += ("seed", "started_at")
SIMULATED = "simulated acceptance: only the times are real, outputs mean nothing"


def parts(records: Sequence[Record]) -> dict[str, tuple[Sequence[Column], Sequence[Record]]]:
    """The tables of rows by caption: the columns, and the rows that have them."""
    # Intervals of acceptance are shown if a row is lenient (A.5).
    lenient = any(record.lenience < 1 for record in records)
    intervals = ("l", "α 95%", "accepted 95%")
    trees = any(record.tree for record in records)
    hidden = {*(() if lenient else intervals), *(() if trees else ("tree",))}
    acceptance = [column for column in ACCEPTANCE if column.head not in hidden]
    sampled = [record for record in records if record.temperature > 0]
    rules = any(record.verification != "token" for record in sampled)
    several = len({record.draft for record in records}) > 1
    compared = [record for record in records if record.outputs_identical is not None]
    sections = {
        "Acceptance": (acceptance, records),
        "Acceptance by rank": (RANKS, [record for record in records if record.tree]),
        "Rules of verification": (VERIFICATION, sampled if rules else []),
        "Speed": (SPEED, records),
        "Drafts": (DRAFTS, records if several else []),
        "Quality": (QUALITY, [record for record in records if record.metric is not None]),
        "Exactness at temperature 0": (EXACTNESS, compared),
    }
    return {caption: part for caption, part in sections.items() if part[1]}


def table(columns: Sequence[Column], rows: Iterable[Any]) -> Table:
    """Rows as a table for the terminal."""
    cells = ([column.cell(row) for column in columns] for row in rows)
    shown = grid([column.head for column in columns], cells)
    for given, made in zip(columns, shown.columns, strict=True):
        made.no_wrap &= not given.several
    return shown


def grid(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Cells as a table for the terminal; if it is narrow, names are folded but not numbers."""
    shown = Table(box=None, pad_edge=False, collapse_padding=True)
    first, *others = heads
    shown.add_column(first, overflow="fold")
    for head in others:
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def meanings(columns: Sequence[Column]) -> str:
    """The meanings of columns, as a list in Markdown."""
    return "\n".join(f"- {x.head}: {x.meaning}" for x in columns if x.meaning)


def show_parts(parts: Sequence[tuple[Sequence[Column], Iterable[Any]]], console: Console) -> None:
    """Prints tables, given by columns and rows, and then the meanings of the columns."""
    for columns, rows in parts:
        console.print(table(columns, rows))
        console.print()
    for columns, _ in parts:
        console.print(meanings(columns), style="dim")


def cut_sources(records: Sequence[Record]) -> str:
    """A sentence that names the rows in which sources were cut; empty if there are none."""
    cut = [f"{r.truncated} of {r.num_examples} in {r.experiment}" for r in records if r.truncated]
    return f"Sources cut to the length of their row: {', '.join(cut)}." if cut else ""


def show_records(records: Sequence[Record], console: Console = CONSOLE) -> None:
    """Prints rows next to the paper's, and how many greedy outputs are equal."""
    if any(record.simulated for record in records):
        console.print(f"This is {SIMULATED}.", style="bold", soft_wrap=True)
    if cut := cut_sources(records):
        console.print(cut, soft_wrap=True)
    show_parts([((ROW, *columns), rows) for columns, rows in parts(records).values()], console)
    for record in records:
        if record.categories:
            console.print(f"\n{_row_name(record)} by category:")
            show_parts([(CATEGORIES, record.categories)], console)


TREES = (  # For `tune`.
    Column("tree", field("nodes"), "guesses in a tree"),
    Column("γ", field("gamma"), "its depth, the best one for its size"),
    Column("per call", field("tokens", ".2f"), "expected tokens per target pass"),
    Column("c", lambda one: thousandths(one.c), "time of a level over that of a target step"),
    Column("v", field("verify_cost", ".2f"), "time of verifying over that of a target step"),
    Column("predicted", field("predicted", ".2f"), "speed-up from these costs"),
)


def show_tuning(tuning: Tuning, console: Console = CONSOLE) -> None:
    """Prints the speed-up over gamma, and the best gamma or why none pays."""
    costs, best = tuning.costs, tuning.gamma
    console.print(
        f"α = {tuning.alpha:.3f} on {len(tuning.lengths)} outputs of "
        f"{sum(tuning.lengths) / len(tuning.lengths):.0f} tokens; a target step takes "
        f"{costs.ms_target_step:.2f} ms, prefill {costs.ms_prefill_target:.1f} + "
        f"{costs.ms_prefill_draft:.1f} ms."
    )
    columns = (
        Column("γ", str),
        Column("c", lambda gamma: thousandths(costs.c(gamma))),
        Column("v", lambda gamma: f"{costs.verify_cost(gamma):.2f}"),
        Column("Theorem 3.8", lambda gamma: f"{tuning.expected(gamma):.2f}"),
        Column("predicted", lambda gamma: f"{tuning.predicted(gamma):.2f}"),
    )
    shown = table(columns, tuning.gammas)
    shown.rows[tuning.gammas.index(best)].style = "bold"
    console.print(shown)
    if tuning.trees:
        console.print(table(TREES, tuning.trees))
    if reason := tuning.why_not():
        console.print(f"Speculation will not pay here. {reason}")
    elif tree := tuning.tree:
        console.print(
            f"Best: a tree of {tree.nodes} guesses of depth γ = {tree.gamma}, "
            f"{tree.predicted:.2f} times as fast as autoregressive decoding; the best chain, "
            f"γ = {best}, {tuning.predicted(best):.2f} times."
        )
    else:
        if tuning.trees:
            console.print(
                "No tree pays here: passes over that many guesses cost more than they save."
            )
        console.print(
            f"Best: γ = {best}, {tuning.predicted(best):.2f} times as fast as autoregressive "
            "decoding. The weights of the target are read "
            f"{tuning.tokens_per_call(best):.2f} times less often."
        )


def show_power(powers: Sequence[Power], draft: str, gamma: int, console: Console = CONSOLE) -> None:
    """Prints the probability that an audit finds each fault of a speculative decoder."""
    columns = (
        Column("fault", lambda one: one.fault),
        # Dashes mark faults found no more often than false alarms.
        Column("found", lambda one: f"≥ {min(one.power, 0.999):.3f}" if one.texts else "–"),
        Column("by the test of", lambda one: one.test if one.texts else "–"),
        Column(f"texts for {ENOUGH}", lambda one: f"{one.texts:,}" if one.texts else "–"),
    )
    console.print(
        f"This many texts find these faults (simulated with {draft}, γ = {gamma}) with a "
        "probability of at least:",
        soft_wrap=True,
    )
    console.print(table(columns, powers))


def show_theory(console: Console = CONSOLE) -> None:
    """Prints Table 1, computed and as in the paper."""
    console.print(table(THEORY, paper.TABLE_1))
    console.print(meanings(THEORY), style="dim")
