"""The report: a record's own numbers, in the right columns, and an honest exactness check."""

import io
import re

from rich.console import Console

from speculative.experiments import report
from speculative.experiments.traces import Line, PromptTrace
from speculative.measurement.exactness import Difference
from speculative.pair import Result
from tests.experiments import made

TRACE = PromptTrace(
    "translate English to German: a [bold] text",
    [Line(" ein", " dicker", " fetter", 1), Line(" Text</s>", "", "", 2)],
    Result("ein fetter Text", [7, 8, 9, 1], 2, 3, 3),
    same_tokens=True,
)
CELLS = "0 6 0.81 0.09 1.36 4.50 3.14 2.66 2.71 2.52–2.93 0.75 3.4"


def shown(rows: list, traced: list[PromptTrace], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(rows, traced, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminals_table_fits_80_columns_uncut() -> None:
    out = shown([made.row(task="debian_synopsis")], [TRACE])
    row, interval = next(
        (a, b)
        for a, b in zip(out.splitlines(), out.splitlines()[1:], strict=False)
        if a.startswith("debian_synopsis")
    )
    cells = CELLS.split()
    assert row.split() == ["debian_synopsis", *cells[:9], *cells[10:]]
    assert interval.split() == [cells[9]]
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_the_table_in_markdown() -> None:
    text = report.markdown([made.row()], [TRACE])
    lines = [line for line in text.splitlines() if line.startswith("| debian_ende")]
    assert lines[0].replace("|", " ").split() == ["debian_ende", *CELLS.split()]
    assert lines[1].replace("|", " ").split() == "debian_ende 0 bleu 25.4 26.3".split()
    assert not re.search(r"<(?!/s>)", text), "HTML"
    for value in ("the_target", "the_draft", "a processor, 2 cores", "abc1234", "0.10.2"):
        assert value in text


def test_what_was_not_measured_is_a_dash() -> None:
    row = made.row(paper_alpha=None, paper_speedup=None, metric=None, quality_speculative=None)
    text = report.markdown([row], [TRACE])
    assert "2.52–2.93 | – | – |" in text
    assert "| – | 25.4 | – |" in text


def test_a_trace_shows_its_prompt_and_steps() -> None:
    for text in (shown([made.row()], [TRACE]), report.markdown([made.row()], [TRACE])):
        assert "debian_ende, T = 0, γ = 6: 4 tokens in 2 target calls" in text
        assert TRACE.source in text
        assert "  1  1/6 │ ein[- dicker-]{+ fetter+}\n  2  2/6 │ Text</s>\n" in text


def test_the_terminal_traces_greedy_rows_the_report_all() -> None:
    rows = [made.row(), made.row(temperature=1.0, outputs_identical=None, near_ties=None)]
    assert shown(rows, [TRACE, TRACE]).count("│ Text</s>") == 1
    assert report.markdown(rows, [TRACE, TRACE]).count("│ Text</s>") == 2


def test_lenient_rows_show_both_acceptances_and_their_intervals() -> None:
    """One column more for l, two for intervals, and no word on exactness."""
    exact = made.record(experiment="table5/exact")
    lenient = made.record(
        experiment="table5/lenient",
        lenience=0.5,
        alpha_accepted_low=0.76,
        alpha_accepted_high=0.84,
        outputs_identical=None,
        near_ties=None,
    )
    console = Console(file=io.StringIO(), width=120)
    report.show_records([exact, lenient], console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    head = "row l γ α α 95% paper accepted accepted 95% c v per call"
    assert lines[1] == head.split()
    shown = "lenient 0.5 6 0.81 0.70–0.90 0.75 0.80 0.76–0.84 0.090 1.36 4.50"
    assert lines[2] == shown.replace("lenient 0.5", "exact 1").replace("0.76–0.84", "–").split()
    assert lines[3] == shown.split()
    said = console.file.getvalue()
    assert "below 1 outputs are not the target's own" in said
    assert "table5/exact: 3 of 3 greedy" in said and "table5/lenient:" not in said
    console.file.truncate(0)
    report.show_records([exact], console)
    assert "lenience" not in console.file.getvalue()


def test_exactness_names_every_difference() -> None:
    rows = [
        made.row([None, Difference(3, 7, 9, 2e-5), None], outputs_identical=2, near_ties=1),
        made.row(temperature=1.0, outputs_identical=None, near_ties=None),
        made.row([Difference(0, 7, 9, 0.25)], task="debian_synopsis", outputs_identical=0),
    ]
    greedy, near, other, unexplained, loops = report.exactness(rows, [TRACE, TRACE])
    assert greedy.startswith("debian_ende, T = 0: 2 of 3 outputs are identical")
    assert "debian_ende, T = 0, prompt 2" in near
    assert "token 4" in near and "2.0e-05" in near and near.endswith("a near tie.")
    assert other.startswith("debian_synopsis, T = 0: 0 of 3 outputs")
    assert "token 1" in unexplained and "2.5e-01" in unexplained and "NOT explained" in unexplained
    assert loops.endswith("the same tokens in 2 of 2.")


def test_exactness_admits_loops_that_differ() -> None:
    differs = PromptTrace(TRACE.source, TRACE.lines, TRACE.result, same_tokens=False)
    assert report.exactness([made.row()], [TRACE, differs])[-1].endswith("in 1 of 2.")
