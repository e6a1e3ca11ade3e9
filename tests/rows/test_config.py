"""Row configurations: each gin file of the checkout, and what makes a wrong one."""

import argparse
import dataclasses
import pathlib
import re
from typing import Any

import pytest

from speculative import paper, theory
from speculative.checkpoints import SHIPPED
from speculative.commands import rows
from speculative.drafts import named
from speculative.drafts.named import MODEL_FREE
from speculative.gin_files import CONFIGS
from speculative.models import SIZES
from speculative.models.distilled import DISTILLED, usual
from speculative.rows.config import RowConfig, addresses, experiment, read_row
from speculative.studies import sweep
from speculative.tasks import TASKS

RUNS = CONFIGS / "runs"
TABLES = ("2", "2_v1_0", "2_v1_0_3b", "3", "5")
ROWS = {experiment(row): row for table in TABLES for row in sweep.rows(table)}
MODERN = sweep.rows("modern")  # Of no paper.


def comment(address: str) -> str:
    """What a gin file says of the paper's numbers for a row."""
    file, _, row = address.partition(".gin:")
    if not row:
        return pathlib.Path(file).read_text().splitlines()[2]
    (line,) = re.findall(rf'^    "{row}": .*$', pathlib.Path(f"{file}.gin").read_text(), re.M)
    return line.partition("#")[2]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_checkout(name: str) -> None:
    """It parses, and its comment has the very numbers of the paper."""
    config, said = read_row(ROWS[name]), comment(ROWS[name])
    table, row_name = name.split("/")
    task, shipped = TASKS[config.task].paper, config.target in SHIPPED
    for part in filter(None, named.parts(config.draft)):
        assert part in (*SIZES, *MODEL_FREE, *SHIPPED)
    assert shipped == row_name.startswith("debian")
    assert config.target in (*SIZES, *SHIPPED)
    assert config.lenience == 1 or table == "table5"
    if not said:
        assert config.paper_draft is None
        assert task in ("ende", "cnndm", "lm1b")
        return
    stated = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", said)]
    lamda = config.target == "lamda_137b"
    assert (config.paper_draft is None) == lamda, "its task is another one"
    setting = {"draft": config.paper_draft or config.draft, "temperature": config.temperature}
    row = paper.find(paper.TABLE_3, task="dialog" if lamda else task, **setting)
    assert row is not None
    if table == "table5":
        lenient = paper.find(paper.TABLE_5, lenience=config.lenience, **setting)
        assert lenient is not None
        at = f"t{config.temperature:.0f}_l{config.lenience:g}".replace(".", "")
        assert row_name.endswith(at)
        numbers = lenient.alpha, lenient.speedup, None if shipped else lenient.gamma
        assert stated == [number for number in numbers if number]
        if not shipped:
            assert "c = 0.015" in (RUNS / "table5.gin").read_text()
            best = max(range(11), key=lambda g: theory.speedup(lenient.alpha, g, 0.015))
            assert config.gamma == (lenient.gamma or best)
    elif table == "table2":
        timed = paper.find(paper.TABLES_2_AND_4, task=task, **setting)
        assert timed is not None and timed.alpha == row.alpha
        costs = [] if shipped else [timed.c, timed.speedup_expected]
        assert stated == [timed.alpha, *costs, timed.speedup]
        assert shipped or config.gamma == timed.gamma
    else:
        assert stated[0] == row.alpha


def test_rows_of_public_weights_are_the_papers_with_other_models() -> None:
    """The same tasks, temperatures and gammas as the paper's rows; and no numbers of the paper."""

    def settings(table: str) -> list[tuple]:
        configs = map(read_row, (row for row in sweep.rows(table) if "debian" not in row))
        return [
            (c.task, c.draft.rpartition("_")[2], c.temperature, c.gamma, c.source_length)
            for c in configs
        ]

    assert settings("2_v1_0") == settings("2")
    assert settings("2_v1_0_3b") == [row for row in settings("2") if row[1] == "small"]
    for table, target in (("2_v1_0", "t5_11b"), ("2_v1_0_3b", "t5_3b")):
        configs = [read_row(row) for row in sweep.rows(table)]
        assert {(c.target, c.dtype, c.paper_draft) for c in configs} == {(target, "bfloat16", None)}


@pytest.mark.parametrize("address", MODERN)
def test_rows_of_public_pairs(address: str) -> None:
    """Pairs of one kind and vocabulary, but for the padding of embeddings; or a distilled draft."""
    config = read_row(address)
    target = SIZES[config.target]
    draft = usual(target) if config.draft == DISTILLED else SIZES[config.draft]
    assert type(target) is type(draft)
    assert 0 <= target.vocab_size - draft.vocab_size <= 64
    assert config.texts.prefix == "" and config.paper_draft is None


@pytest.mark.parametrize("file", sorted(RUNS.rglob("*.gin")), ids=lambda file: file.stem)
def test_commands_in_comments_name_rows_that_are_there(file: pathlib.Path) -> None:
    found = re.findall(r"--gin_file=(configs\S+)", file.read_text())
    assert found or file.stem == "base"
    for address in found:
        assert address in [*ROWS.values(), *MODERN]
        assert str(file) in str(CONFIGS.parent / address)


def test_every_row_of_table_5_is_there_and_once_more_for_the_shipped_pair() -> None:
    found = [
        (c.target, c.paper_draft, c.temperature, c.lenience) for c in map(read_row, sweep.rows("5"))
    ]
    rows = [(row.draft, row.temperature, row.lenience) for row in paper.TABLE_5]
    shipped = [row for row in rows if row[0] == "small"]
    want = [("t5_1_1_xxl", *row) for row in rows] + [("debian_target", *row) for row in shipped]
    assert sorted(found) == sorted(want)
    assert len(want) == 28


def test_every_row_of_table_3_is_there() -> None:
    found = {
        (c.target, c.draft if "lamda" in c.target else c.paper_draft, task, c.temperature)
        for c in map(read_row, sweep.rows("3"))
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
        for c in map(read_row, sweep.rows("2"))
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
        "include 'configs/runs/base.gin'\ninclude 'whole.gin'\nRowConfig.target = 'debian_lm'"
    )
    config = read_row("row.gin")
    assert (config.dtype, config.draft, config.target) == ("bfloat16", "b", "debian_lm")
    assert pathlib.Path.cwd() == tmp_path


def test_a_file_of_the_working_directory_wins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the one that ships, as a row, as an include, as a row of a table and as a table."""
    row = "configs/runs/table2/ende_small_t0.gin"
    assert read_row(row).gamma == 7
    monkeypatch.chdir(tmp_path)
    assert read_row(row).gamma == 7
    addresses = sweep.rows("2")
    own = tmp_path / row
    own.parent.mkdir(parents=True)
    own.write_text((CONFIGS.parent / row).read_text() + "RowConfig.gamma = 3\n")
    assert read_row(row).gamma == 3
    assert [read_row(address).gamma for address in addresses[:2]] == [7, 7]
    assert [read_row(address).gamma for address in sweep.rows("2")[:2]] == [3, 7]
    assert [*map(experiment, sweep.rows("2"))] == [*map(experiment, addresses)]
    (tmp_path / "configs" / "runs" / "base.gin").write_text("RowConfig.target = 't5_1_1_base'")
    assert {read_row(address).target for address in sweep.rows("2")[:12]} == {"t5_1_1_base"}
    (tmp_path / "configs" / "runs" / "table9.gin").write_text("Table.rows = {'a': {}, 'b': {}}")
    assert [*map(experiment, sweep.rows("9"))] == ["table9/a", "table9/b"]
    with pytest.raises(ValueError, match="the tables are 1, 2, 3, 5, 9"):
        sweep.rows("8")


def test_bindings_override_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "row.gin"
    file.write_text(WHOLE)
    config = read_row(file, ["RowConfig.gamma = 3", 'RowConfig.draft = "c"'])
    assert config == RowConfig(task="debian_ende", target="a", draft="c", temperature=0.0, gamma=3)
    # Nothing of one file stays for the next.
    assert read_row(file).gamma is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("RowConfig.gama = 3", "gama'.*It has task, target, draft"),
        ('Table.rows = {"a": {"gamma": 3}}', "is a table; name a row of it, .*row.gin:ROW: a"),
        ("RowConf.gamma = 3", "RowConf"),
        ("RowConfig.gamma = 0", "gamma must be a whole number from 1 to 64, not 0"),
        ("RowConfig.seed = -1", r"RowConfig\.seed must be a whole number from 0 to .*, not -1"),
        ("RowConfig.rounds = None", r"RowConfig\.rounds must be .* from 1 .*, not None"),
        ("RowConfig.dtype = 'int4'", r"RowConfig\.dtype must be .* bfloat16, not 'int4'"),
        ("RowConfig.dtype = 16", r"RowConfig\.dtype must be a text or None, not 16"),
        ("RowConfig.temperature = 'x'", r"temperature must be a finite number, not 'x'\.$"),
        ("RowConfig.top_k = True", r"RowConfig\.top_k must be a whole number, not True"),
        ("RowConfig.task = ['a']", r"RowConfig\.task must be a text, not \['a'\]"),
        ("RowConfig.target = unigram", r"line 6 of \S+row\.gin: 'unigram' is no value; .*quotes"),
        (
            "gamma = 3",
            r"line 6 of \S+row\.gin \(gamma = 3\) binds nothing; .* as in RowConfig\.gamma",
        ),
        ("a/RowConfig.gamma = 3", r"binds nothing; name its configurable, as in RowConfig\.gamma"),
        ("RowConfig.gamma = [3\n\n", r"line \d of \S+row\.gin: a bracket .* is not closed"),
        ("RowConfig.gamma = " + "[" * 3000, r"row\.gin: .*(nested|not closed)"),
        (
            "RowConfig.gamma = @RowConfig",
            r"line 6 of \S+row\.gin: @RowConfig would run code; .*\.$",
        ),
        ("RowConfig.gamma = {[]: 1}", r"row\.gin: unhashable"),
        ("RowConfig.gamma = %none", "none"),
        (
            "\ninclude 'row.gin'",
            r"line 7 of \S+row\.gin \(include 'row\.gin'\) includes a file within",
        ),
        ("Table.rows = {'../../a': {}}", r"Table has '\.\./\.\./a': .* without slashes"),
        ("Table.rows = {'a': 5}", r"Table has 'a': 5, but needs .* parameters"),
        ("Table.rows = 5", r"row\.gin is no configuration of a row"),
        ("RowConfig.top_p = 0", r"RowConfig\.top_p must lie"),
        ('RowConfig.task = "other"', "no task 'other'.*debian_ende"),
        ("RowConfig.lenience = 0", r"RowConfig\.lenience must be a number in \(0, 1\], not 0"),
        ("RowConfig.lenience = 0." + "0" * 400, r"lenience must be .* not 0"),
        ("RowConfig.simulated_alpha = 1.5", r"RowConfig\.simulated_alpha .* \[0, 1\], not 1.5"),
        ("RowConfig.simulated_alpha = 0.5", "set RowConfig.gamma"),
        (
            "include 'configs/runs/none.gin'",
            r"line 6 of .*includes configs/runs/none.gin, which does not exist",
        ),
    ],
)
def test_wrong_configurations(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, lines: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "row.gin"
    file.write_text(WHOLE + lines + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_row(file)
    assert " object at 0x" not in str(error.value)


def test_includes_that_double_at_each_level_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for level in range(40):
        (tmp_path / f"{level}.gin").write_text(f"include '{level + 1}.gin'\n" * 2)
    (tmp_path / "40.gin").write_text(WHOLE)
    with pytest.raises(ValueError, match="more than 100 files in all; include fewer"):
        read_row(tmp_path / "0.gin")


def test_bytes_that_are_no_text_and_a_mark_before_the_text(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "row.gin"
    file.write_bytes(f"\ufeff{WHOLE}RowConfig.seed = 7\r\n".encode())
    assert read_row(file).seed == 7
    file.write_bytes(WHOLE.encode() + b"# caf\xe9")
    with pytest.raises(ValueError, match=r"Line 6 of \S+row\.gin is not UTF-8"):
        read_row(file)


CODE = "import os\nRowConfig.dtype = @os.getcwd()"
DYNAMIC = f"from __gin__ import dynamic_registration\n{CODE}"


@pytest.mark.parametrize("lines", [CODE, DYNAMIC, "import made_by_a_stranger", "include 'b.gin'"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_row_runs_no_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, lines: str, bound: bool
) -> None:
    """Neither its file's nor an included one's nor a binding's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made_by_a_stranger.py").write_text("open('ran', 'w')")
    (tmp_path / "b.gin").write_text("RowConfig.gamma = 3\nimport made_by_a_stranger")
    (tmp_path / "row.gin").write_text(WHOLE + lines * (not bound))
    with pytest.raises(ValueError, match=r"would run code|imports \S+; it may import nothing"):
        read_row("row.gin", [lines] * bound)
    assert not (tmp_path / "ran").exists()


def test_macros_are_data(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "row.gin"
    file.write_text(WHOLE + "here = 4\nRowConfig.gamma = %here\n")
    assert read_row(file).gamma == 4
    assert read_row(file, ["here = 5"]).gamma == 5
    with pytest.raises(
        ValueError, match=r"the binding \(gamma=3\) binds .* as in RowConfig\.gamma"
    ):
        read_row(file, ["gamma=3"])


def test_a_row_of_a_bare_file_name_is_named_after_its_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "/row", which joined to a results folder would be a folder at the root."""
    (tmp_path / "mine" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert experiment("row.gin") == experiment("below/../row.gin") == "mine/row"
    monkeypatch.chdir("below")
    assert experiment("../row.gin") == "mine/row"
    assert experiment("/row.gin") == "row"


def test_a_value_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "row.gin"
    file.write_text(WHOLE.replace('RowConfig.draft = "b"\n', ""))
    with pytest.raises(ValueError, match=r"row\.gin gives no value for RowConfig\.draft"):
        read_row(file)
    with pytest.raises(ValueError, match="There is no configuration"):
        read_row(tmp_path / "none.gin")


TABLE = """
Table.shared = {
    "*_t1": {"temperature": 1.0, "gamma": 4},
    "b_*": {"draft": "of b"},  # Of two drafts.
}
Table.rows = {
    "a_t0": {},
    "b_t1": {"gamma": 2},
    "c_t1": {"gama": 2},
}
"""


def test_the_rows_of_a_table(tmp_path: pathlib.Path) -> None:
    """The file's, then what is shared, then a row's own, then bindings; rows do not mix."""
    file = tmp_path / "mine.gin"
    file.write_text(WHOLE + TABLE)
    a, b, c = addresses(file)
    assert [experiment(row) for row in (a, b, c)] == ["mine/a_t0", "mine/b_t1", "mine/c_t1"]
    whole = RowConfig(task="debian_ende", target="a", draft="b", temperature=0.0)
    of_b = dataclasses.replace(whole, temperature=1.0, draft="of b", gamma=2)
    assert [read_row(b), read_row(a)] == [of_b, whole]
    assert read_row(b, ["RowConfig.gamma = 3"]) == dataclasses.replace(of_b, gamma=3)
    with pytest.raises(ValueError, match=r"mine\.gin:c_t1 .*named 'gama'.*It has task, target"):
        read_row(c)
    with pytest.raises(ValueError, match=r"no row 'd'; its rows are a_t0, b_t1, c_t1\."):
        read_row(f"{file}:d")
    with pytest.raises(ValueError, match=r"name a row of it, .*mine\.gin:ROW: a_t0, b_t1"):
        read_row(file)
    file.write_text(WHOLE + TABLE.replace("b_*", "d_*"))
    with pytest.raises(ValueError, match=r"mine\.gin:a_t0 .*shared has 'd_\*', which matches no"):
        read_row(a)


def test_files_of_the_old_layout_are_named_anew() -> None:
    for name in ("table3/ende_bigram_t0", "table2/debian_ende_t1", "table5/ende_base_t1_l01"):
        table, row = name.split("/")
        with pytest.raises(ValueError, match=rf"--gin_file=\S+/{table}\.gin:{row}\.$") as error:
            read_row(f"configs/runs/{name}.gin")
        assert experiment(str(error.value).partition("--gin_file=")[2].rstrip(".")) == name


def own_row(**changes: Any) -> RowConfig:
    return RowConfig(task="own", prefix="", target="a", draft="b", gamma=3, **changes)


def test_a_table_has_each_row_with_trees_too() -> None:
    configs = {"a/t0": own_row(temperature=0.0), "a/t1": own_row(temperature=1.0)}
    here = argparse.Namespace()
    found = rows._with_trees(here, configs, 15)
    assert {name: (row.verification, row.tree) for name, row in found.values()} == {
        "a/t0_tree15": ("token", 15), "a/t1_tree15": ("coupled", 15),
    }  # fmt: skip
    others = {
        "a/copy": own_row(temperature=0.0),
        "a/lenient": own_row(temperature=0.0, lenience=0.5),
    }
    others["a/copy"] = dataclasses.replace(others["a/copy"], draft="copy")
    assert list(rows._with_trees(here, configs | others, 15)) == list(found)
    with pytest.raises(ValueError, match="No row of the table can have trees of 15 guesses"):
        rows._with_trees(here, others, 15)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 1.0, "tree": 7}, "RowConfig.tree is for temperature 0 or verification"),
        ({"temperature": 0.0, "tree": 7, "lenience": 0.5}, "RowConfig.tree is for exact"),
        ({"temperature": 0.0, "tree": 2}, "tree = 2 guesses do not fit gamma = 3"),
        ({"temperature": 0.0, "tree": 256}, "RowConfig.tree must be a whole number from 0 to 255"),
    ],
)
def test_a_tree_that_no_row_can_have(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        own_row(**changes)


def test_rules_of_a_table_stand_side_by_side_above_temperature_0() -> None:
    configs = {"a/t0": own_row(temperature=0.0), "a/t1": own_row(temperature=1.0)}
    found = rows._of_rules(configs, ["token", "block"])
    assert {name: row.verification for name, row in found.items()} == {
        "a/t1": "token", "a/t1_block": "block",
    }  # fmt: skip
    assert list(rows._of_rules(configs, ["block"])) == ["a/t0_block", "a/t1_block"]
    with pytest.raises(ValueError, match="no verification 'blocks'; known are token, block"):
        rows._of_rules(configs, ["blocks"])
    lenient = {"a/t1": own_row(temperature=1.0, lenience=0.5)}
    with pytest.raises(ValueError, match="lenience = 0.5 is for token verification, not for block"):
        rows._of_rules(lenient, ["block"])
