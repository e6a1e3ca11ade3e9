"""Row configurations: each gin file of the checkout, and what makes a wrong one."""

import pathlib
import re

import pytest

from speculative.experiments import paper, settings
from speculative.experiments.settings import RowConfig, parse
from speculative.models import SIZES
from speculative.pair import MODEL_FREE
from speculative.tasks import TASKS

RUNS = settings.CONFIGS / "runs"
FILES = sorted(RUNS.glob("*/*.gin"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_row_of_the_checkout(file: pathlib.Path) -> None:
    """It parses, its comment names its own command and the very numbers of the paper."""
    config = parse(file)
    comment = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert f"--gin_file=configs/runs/{file.parent.name}/{file.name}" in comment[1]
    task = TASKS[config.task].paper
    assert config.paper_draft is not None
    stated = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", comment[2].split(":")[1])]
    row = paper.alpha_row(task, config.paper_draft, config.temperature)
    timed = paper.speedup_row(task, config.paper_draft, config.temperature)
    assert row is not None
    assert stated[0] == row.alpha
    if config.target == "t5_1_1_xxl":
        assert config.target in SIZES
        assert config.draft in SIZES or config.draft in (*MODEL_FREE, "unigram")
        if timed and file.parent.name == "table2":
            assert stated == [timed.alpha, timed.c, timed.speedup_expected, timed.speedup]
            assert config.gamma == timed.gamma


def test_the_twelve_rows_of_the_papers_tables_2_and_4_are_all_there() -> None:
    found = {
        (TASKS[c.task].paper, c.paper_draft, c.temperature, c.gamma)
        for c in map(parse, sorted((RUNS / "table2").glob("*.gin")))
        if c.target == "t5_1_1_xxl"
    }
    want = {(r.task, r.draft, r.temperature, r.gamma) for r in paper.TABLES_2_AND_4}
    assert found == want
    assert len(want) == 12


WHOLE = """
RowConfig.task = "debian_ende"
RowConfig.target = "a"
RowConfig.draft = "b"
RowConfig.temperature = 0.0
"""


def test_bindings_override_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "row.gin"
    file.write_text(WHOLE)
    config = parse(file, ["RowConfig.gamma = 3", 'RowConfig.draft = "c"'])
    assert config == RowConfig(task="debian_ende", target="a", draft="c", temperature=0.0, gamma=3)
    # Nothing of one file stays for the next.
    assert parse(file).gamma is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("RowConfig.gama = 3", "gama"),
        ("RowConf.gamma = 3", "RowConf"),
        ("RowConfig.gamma = 0", "gamma must be a whole number from 1, not 0"),
        ("RowConfig.gamma = 2.5", "gamma must be a whole number from 1, not 2.5"),
        ("RowConfig.temperature = -1", "temperature must be"),
        ("RowConfig.top_p = 0", "top_p must lie"),
        ('RowConfig.task = "other"', "no task 'other'.*debian_ende"),
        ("RowConfig.simulated_alpha = 1.5", r"simulated_alpha must lie in \[0, 1\], not 1.5"),
        ("RowConfig.simulated_alpha = 0.5", "set RowConfig.gamma"),
        ("RowConfig.gamma = ", "row.gin"),
        ("include 'none.gin'", "row.gin .*none.gin"),
    ],
)
def test_wrong_configurations(tmp_path: pathlib.Path, lines: str, message: str) -> None:
    file = tmp_path / "row.gin"
    file.write_text(WHOLE + lines + "\n")
    with pytest.raises(ValueError, match=message):
        parse(file)


def test_a_value_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "row.gin"
    file.write_text(WHOLE.replace('RowConfig.draft = "b"\n', ""))
    with pytest.raises(ValueError, match=r"row\.gin gives no value for RowConfig\.draft"):
        parse(file)
    with pytest.raises(ValueError, match="There is no configuration"):
        parse(tmp_path / "none.gin")
