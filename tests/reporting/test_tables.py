"""The terminal's tables: a record's own numbers, in the right columns, and honest exactness."""

import pytest

from speculative.measurement.timing import Costs
from speculative.reporting import tables
from speculative.rows.categories import Category
from speculative.rows.records import Record
from speculative.studies.power import Power
from speculative.studies.tune import Tuning
from tests.printed import printed
from tests.rows import made


def shown(*records: Record, width: int = 80) -> list[str]:
    return printed(tables.show_records, records, width=width).splitlines()


def test_tables_fit_80_columns_uncut() -> None:
    lines = shown(
        made.record(
            experiment="table2/debian_synopsis_t0",
            outputs_identical=4,
            near_ties=1,
            metric="rougeL",
        )
    )
    rows = [line.split() for line in lines if line.startswith("debian_synopsis_t0")]
    assert rows == [
        "debian_synopsis_t0 6 0.81 0.75 0.80 0.090 1.36 4.50".split(),
        "debian_synopsis_t0 3.14 2.66 2.71 2.52–2.93 3.4".split(),
        "debian_synopsis_t0 rougeL 25.4 26.3 +0.9 -1.25 to 3.05".split(),
        # Of six outputs four are equal and one parts at a near tie.
        "debian_synopsis_t0 4 of 6 1 1".split(),
    ]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_several_drafts_have_their_sizes() -> None:
    sized = {"draft_parameters": 3_800_000, "draft_bytes": 5_120_000}
    records = [
        made.record(experiment="t/one", draft="small", **sized, draft_training_minutes=144.6),
        made.record(experiment="t/two", draft="copy"),
    ]
    lines = [line.split() for line in shown(*records)]
    assert ["one", "small", "3.80", "5.12", "145"] in lines
    assert ["two", "copy", "–", "–", "–"] in lines
    assert not any("minutes" in line for line in shown(records[0], records[0]))


def test_what_was_not_measured_is_a_dash() -> None:
    changes = {"paper_alpha": None, "paper_speedup": None, "metric": None}
    lines = shown(made.record(**changes, quality_speculative=None, outputs_identical=None))
    rows = [line.split() for line in lines if line.startswith("made")]
    assert (rows[0][3], rows[1][5:]) == ("–", ["–"])
    assert len(rows) == 2
    older = shown(made.record(quality_difference=None, quality_difference_low=None))
    assert "made bleu 25.4 26.3 – –".split() in [line.split() for line in older]


def test_a_long_name_is_folded_and_numbers_are_whole() -> None:
    name = "flan-t5-small-finetuned-on-headlines-my_distilled_draft-t0.7"
    lines = shown(made.record(experiment=f"own/{name}"))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert any(line.split()[-3:] == ["0.090", "1.36", "4.50"] for line in lines)
    assert "".join(line.split()[0] for line in lines[1:3]) == name


def test_the_shares_of_many_positions_take_several_lines() -> None:
    one = Category(
        category="translation",
        questions=10,
        tokens=900,
        mean_accepted_tokens=2.45,
        tested_by_position=[200, 100, 80, 50, 40, 20, 20],
        accepted_by_position=[100, 80, 50, 40, 20, 20, 19],
        tokens_per_second_autoregressive=49.2,
        tokens_per_second=102.1,
        speedup=2.07,
        speedup_low=1.67,
        speedup_high=2.54,
    )
    said = "\n".join(shown(made.record(categories=[one])))
    _, _, said = said.partition("by category:")
    rows, _, _ = said.partition("- category")
    assert max(map(len, rows.splitlines())) <= 80
    positions = [".50", ".80", ".62", ".80", ".50", "1.00", ".95"]
    measured = ["10", "2.45", "49.2", "102.1", "2.07", "1.67–2.54"]
    cells = rows.split()[rows.split().index("translation") :]
    assert sorted(cells) == sorted(["translation", *measured, *positions])


@pytest.mark.parametrize("name", ["dr$$aft", "_dr$x_{1$", "[bold]a", ":smile:", "翻訳モデル"])
def test_names_are_printed_as_they_are(name: str) -> None:
    rows = made.record(experiment=f"own/{name}", draft=name), made.record(draft="other")
    said = "".join(shown(*rows, width=150))
    assert said.count(name) >= 3


@pytest.mark.parametrize("few", [1, 5])
def test_few_examples_have_no_interval(few: int) -> None:
    lines = shown(made.record(num_examples=few, lenience=0.5, outputs_identical=None), width=120)
    cells = [line.split() for line in lines if line.startswith("made")]
    assert cells[0] == "made 0.5 6 0.81 – 0.75 0.80 – 0.090 1.36 4.50".split()
    assert cells[1][1:5] == ["3.14", "2.66", "2.71", "–"]
    assert cells[2][-2:] == ["+0.9", "–"]


def test_a_draft_too_quick_to_be_timed_does_not_cost_nothing() -> None:
    costs = [
        line.split()[5] for c in (0.0, 0.0004, 0.0006) for line in shown(made.record(c=c))[1:2]
    ]
    assert costs == ["<0.001", "<0.001", "0.001"]
    assert tables.thousandths(12.3456) == "12.346"


def tuned(alpha: float, ms_verify: float) -> str:
    """What is said of a pair whose target step takes 2 ms, and a guess no time at all."""
    costs = Costs(1.0, 1.0, 2.0, {1: ms_verify}, {1: 0.0})
    return printed(tables.show_tuning, Tuning(alpha, [40, 60], costs))


def test_tuning_where_every_guess_is_accepted() -> None:
    said = tuned(1.0, 2.5)
    assert "inf" not in said
    assert "Best: γ = 1" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("1 ")] == ["<0.001"]


def test_the_power_of_an_audit() -> None:
    powers = [Power("one", 0.9999, "tokens", 1200), Power("two", 0.0002, "tokens", None)]
    said, _, *lines = printed(tables.show_power, powers, "copy", 2, width=120).splitlines()
    assert "(simulated with copy, γ = 2)" in said
    # What is no likelier than a false alarm is not found.
    assert [line.split() for line in lines] == [
        "one ≥ 0.999 tokens 1,200".split(),
        "two – – –".split(),
    ]


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
    assert [line[0] for line in lines if line[1:] == ["6", "of", "6", "0", "0"]] == ["exact"]
    assert "lenience" not in " ".join(shown(exact))
