"""Row configurations: each gin file of the checkout, and what makes a wrong one."""

import pathlib
import re

import pytest

from speculative import theory
from speculative.checkpoints import SHIPPED
from speculative.drafts.named import MODEL_FREE
from speculative.experiments import paper
from speculative.experiments.settings import RowConfig, parse
from speculative.gin_files import CONFIGS
from speculative.models import SIZES
from speculative.tasks import TASKS

RUNS = CONFIGS / "runs"
FILES = sorted(RUNS.glob("*/*.gin"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_row_of_the_checkout(file: pathlib.Path) -> None:
    """It parses, its comment names its own command and the very numbers of the paper."""
    config = parse(file)
    comment = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert f"--gin_file=configs/runs/{file.parent.name}/{file.name}" in comment[1]
    task = TASKS[config.task].paper
    assert config.draft in (*SIZES, *MODEL_FREE, *SHIPPED)
    assert (config.target in SHIPPED) == file.stem.startswith("debian")
    assert config.target in (*SIZES, *SHIPPED)
    assert config.lenience == 1 or file.parent.name == "table5"
    if comment[2] == "# The paper has no such row.":
        assert config.paper_draft is None
        assert task in ("ende", "cnndm", "lm1b")
        return
    stated = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", comment[2].split(":")[1])]
    if config.target == "lamda_137b":
        assert config.paper_draft is None, "its task is another one"
        (row,) = (
            r
            for r in paper.TABLE_3
            if (r.draft, r.temperature) == (config.draft, config.temperature)
        )
        assert stated == [row.alpha]
        return
    assert config.paper_draft is not None
    if file.parent.name == "table5":
        _check_lenient(config, comment, stated)
        return
    row = paper.alpha_row(task, config.paper_draft, config.temperature)
    timed = paper.speedup_row(task, config.paper_draft, config.temperature)
    assert row is not None
    assert stated[0] == row.alpha
    if config.target == "t5_1_1_xxl" and timed and file.parent.name == "table2":
        assert stated == [timed.alpha, timed.c, timed.speedup_expected, timed.speedup]
        assert config.gamma == timed.gamma


def _check_lenient(config: RowConfig, comment: list[str], stated: list[float]) -> None:
    """A row of Table 5: what the paper states, in that order, and the best gamma elsewhere."""
    assert config.paper_draft is not None
    row = paper.lenience_row(config.paper_draft, config.temperature, config.lenience)
    assert row is not None
    assert f"T = {config.temperature:.0f}, lenience {config.lenience:g}." in comment[0]
    if config.target != "t5_1_1_xxl":
        assert stated == [row.alpha, row.speedup]
        return
    assert stated == [number for number in (row.alpha, row.speedup, row.gamma) if number]
    best = theory.best_gamma(row.alpha, paper.TABLE_5_C, max_gamma=10)
    assert config.gamma == (row.gamma or best)


def test_every_row_of_table_5_is_there_and_once_more_for_the_shipped_pair() -> None:
    found = [
        (c.target, c.paper_draft, c.temperature, c.lenience)
        for c in map(parse, (RUNS / "table5").glob("*.gin"))
    ]
    rows = [(row.draft, row.temperature, row.lenience) for row in paper.TABLE_5]
    shipped = [row for row in rows if row[0] == "small"]
    want = [("t5_1_1_xxl", *row) for row in rows] + [("debian_target", *row) for row in shipped]
    assert sorted(found) == sorted(want)
    assert len(want) == 28


def test_every_row_of_table_3_is_there() -> None:
    found = {
        (c.target, c.draft if "lamda" in c.target else c.paper_draft, task, c.temperature)
        for c in map(parse, (RUNS / "table3").glob("*.gin"))
        if c.target in SIZES
        for task in ["dialog" if "lamda" in c.target else TASKS[c.task].paper]
    }
    names = {"t5_xxl": "t5_1_1_xxl"}
    rows = {
        (names.get(row.target, row.target), row.draft, row.task, row.temperature)
        for row in paper.TABLE_3
    }
    assert found == rows


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


def test_files_include_those_of_the_checkout_and_of_the_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although gin takes the checkout's folders for packages where Python finds them."""
    monkeypatch.syspath_prepend(CONFIGS.parent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.gin").write_text(WHOLE)
    (tmp_path / "row.gin").write_text(
        "include 'configs/runs/debian.gin'\ninclude 'whole.gin'\nRowConfig.target = 'debian_lm'"
    )
    config = parse("row.gin")
    assert (config.gamma, config.draft, config.target) == (5, "b", "debian_lm")
    assert pathlib.Path.cwd() == tmp_path


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
        ("RowConfig.lenience = 0", r"lenience must be a number in \(0, 1\], not 0"),
        ("RowConfig.lenience = 1.01", r"lenience must be .* not 1.01"),
        ("RowConfig.lenience = 'nan'", r"lenience must be .* not 'nan'"),
        ("RowConfig.simulated_alpha = 1.5", r"simulated_alpha must lie in \[0, 1\], not 1.5"),
        ("RowConfig.simulated_alpha = 0.5", "set RowConfig.gamma"),
        ("RowConfig.gamma = ", "row.gin"),
        ("include 'none.gin'", "row.gin .*none.gin"),
        ("include 'configs/runs/none.gin'", "row.gin .*none.gin"),
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
