"""The terminal's tables: a record's own numbers, in the right columns, and honest exactness."""

import io

from rich.console import Console

from speculative.reporting import tables
from speculative.rows.records import Record
from tests.rows import made


def shown(*records: Record, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    tables.show_records(records, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_tables_fit_80_columns_uncut() -> None:
    lines = shown(
        made.record(
            experiment="table2/debian_synopsis_t0", near_ties=1, num_examples=5, metric="rougeL"
        )
    )
    rows = [line.split() for line in lines if line.startswith("debian_synopsis_t0")]
    assert rows == [
        "debian_synopsis_t0 6 0.81 0.75 0.80 0.090 1.36 4.50".split(),
        "debian_synopsis_t0 3.14 2.66 2.71 2.52–2.93 3.4 rougeL 25.4/26.3".split(),
        # Of five outputs three are equal and one parts at a near tie.
        "debian_synopsis_t0 3 of 5 1 1".split(),
    ]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_what_was_not_measured_is_a_dash() -> None:
    changes = {"paper_alpha": None, "paper_speedup": None, "metric": None}
    lines = shown(made.record(**changes, quality_speculative=None, outputs_identical=None))
    rows = [line.split() for line in lines if line.startswith("made")]
    assert (rows[0][3], rows[1][5:]) == ("–", ["–", "–"])
    assert len(rows) == 2


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
    text = shown(exact, lenient, width=120)
    lines = [line.split() for line in text]
    head = "row l γ α α 95% paper accepted accepted 95% c v per call"
    assert lines[0] == head.split()
    cells = "lenient 0.5 6 0.81 0.70–0.90 0.75 0.80 0.76–0.84 0.090 1.36 4.50"
    assert lines[1] == cells.replace("lenient 0.5", "exact 1").replace("0.76–0.84", "–").split()
    assert lines[2] == cells.split()
    assert "below 1 outputs are not the target's own" in " ".join(text)
    assert [line[0] for line in lines if line[1:] == ["3", "of", "3", "0", "0"]] == ["exact"]
    assert "lenience" not in " ".join(shown(exact))
