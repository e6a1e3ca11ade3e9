"""Tables rerun from their gin files: resumed, shown beside the paper, and refused where wrong."""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from speculative import cli, disk, paper
from speculative.gin_files import CONFIGS
from speculative.measurement.timing import Costs
from speculative.reporting import page
from speculative.rows import records
from speculative.rows.config import RowConfig, experiment
from speculative.studies import sweep
from tests import saved
from tests.rows import made

ROW = """
RowConfig.task = "debian_ende"
RowConfig.target = "target"
RowConfig.draft = "draft"
RowConfig.temperature = 1.0
RowConfig.gamma = 2
RowConfig.max_length = 12
RowConfig.rounds = 1
RowConfig.paper_draft = "small"
"""


@pytest.fixture
def row(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Its costs are given; `test_random_weights_at_true_sizes` measures them."""
    made.no_timing(monkeypatch, Costs(8, 2, 2, {2: 2.4}, {2: 0.5}))
    file = tmp_path / "table2" / "small.gin"
    file.parent.mkdir()
    file.write_text(ROW)
    return file


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, which take a second; `test_page` and `test_own_rows` see them."""
    monkeypatch.setattr(page, "_figures", lambda rows: [])


@pytest.fixture
def arguments(
    row: pathlib.Path, tmp_path: pathlib.Path, saved_pair: tuple[pathlib.Path, pathlib.Path]
) -> list[str]:
    folder = str(saved_pair[0].parent)
    output = str(tmp_path / "out")
    return ["run", "--gin_file", str(row), "--checkpoints", folder, "--output_dir", output]


def examples(folder: pathlib.Path) -> list[dict]:
    text = (folder / "rows" / "table2" / "small" / "examples.jsonl").read_text()
    # What a run writes but its times is the same in every run.
    return [json.loads(line) | {"seconds": None} for line in text.splitlines()]


# Ends itself with the line of the third example just written, and half of another one.
KILLED = """
import os, pathlib, signal, sys
from speculative import cli
from speculative.rows.kept import KeptExamples
add, file = KeptExamples.add, pathlib.Path(sys.argv.pop(1))
def add_or_die(kept, example):
    add(kept, example)
    if len(list(kept)) == 3:
        with file.open("ab") as lines:
            lines.write(b'{"number": 3')
        os.kill(os.getpid(), signal.SIGKILL)
KeptExamples.add = add_or_die
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_row_killed_on_its_way_goes_on(
    arguments: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed outright, the same command ends with the same numbers, and measures nothing twice."""
    whole = [*arguments[:-1], str(tmp_path / "whole"), "--limit", "5"]
    assert cli.main(whole) == 0
    arguments += ["--limit", "5"]
    kept = tmp_path / "out" / "rows" / "table2" / "small" / "examples.jsonl"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(kept), *arguments])
    assert killed.returncode == -signal.SIGKILL
    before, half = kept.read_bytes().rsplit(b"\n", 1)
    assert before.count(b"\n") == 2 and half
    assert cli.main(arguments) == 0
    assert kept.read_bytes().startswith(before + b"\n")
    assert examples(tmp_path / "out") == examples(tmp_path / "whole")
    (one,) = records.read(tmp_path / "out" / "records.jsonl")
    (other,) = records.read(tmp_path / "whole" / "records.jsonl")
    assert (one.alpha, one.num_target_calls) == (other.alpha, other.num_target_calls)
    # Once more: it is done, and stays as it is.
    assert cli.main(arguments) == 0
    assert records.read(tmp_path / "out" / "records.jsonl") == [one]
    assert "table2/small" in one.experiment
    assert "0.62" in capsys.readouterr().out  # The paper's alpha.
    # Other settings are refused, by the record or by the examples that are kept.
    assert cli.main([*arguments, "--seed", "1"]) == 2
    said = capsys.readouterr().err
    assert "record of table2/small with other settings" in said and "--output_dir" in said
    (tmp_path / "out" / "records.jsonl").unlink()
    assert cli.main([*arguments, "--seed", "1"]) == 2
    assert "(RowConfig.seed = 0)" in capsys.readouterr().err


def test_a_row_of_other_weights_or_texts_is_refused(
    arguments: list[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Finished or not, where they lie under the same names; what did not change is as it was."""
    models, data, out = tmp_path / "models", tmp_path / "texts.tsv", tmp_path / "out"
    shutil.copytree(arguments[4], models)
    arguments[4] = str(models)
    texts = "a map\teine Karte\nan editor\tein Editor\n"
    data.write_text(texts)
    arguments += ["--data_file", str(data)]
    assert cli.main(arguments) == 0
    (record,) = records.read(out / "records.jsonl")
    assert [*(record.fingerprints or {})] == ["target", "draft", "vocabulary", "texts"]
    row = out / "rows" / "table2" / "small"

    kept = (out / "records.jsonl").read_text()

    def changed(said: str) -> None:
        for words in ("has a record of table2/small whose", f"{row} holds examples whose"):
            assert cli.main(arguments) == 2
            error = capsys.readouterr().err
            assert f"{words} {said} changed" in error
            assert "under the same name; give another --output_dir" in error
            (out / "records.jsonl").write_text("")
        (out / "records.jsonl").write_text(kept)

    data.write_text(texts.replace("Editor", "Texteditor"))
    changed("texts")
    data.write_text(texts)
    shutil.rmtree(models / "draft")
    saved.save(models / "draft", saved.DRAFT, 7)
    changed("draft")
    # Those of before fingerprints were kept are gone on with, which is said.
    disk.write(out / "records.jsonl", "")
    old = dataclasses.asdict(record)
    del old["fingerprints"]
    disk.append(out / "records.jsonl", old)
    assert cli.main(arguments) == 0
    assert "record of table2/small" in caplog.messages[0] and "not known" in caplog.messages[0]


def test_a_second_run_in_a_folder_is_refused(
    arguments: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `demo` too, which leaves what the first one wrote."""
    record = tmp_path / "out" / "records.jsonl"
    with disk.owned(tmp_path / "out"):
        disk.append(record, dataclasses.asdict(made.record()))
        for command in (arguments, ["demo", "--limit=1", *arguments[-2:]]):
            assert cli.main(command) == 2
            assert "Another process is writing results to" in capsys.readouterr().err
    assert records.read(record) == [made.record()]
    assert not (tmp_path / "out" / "rows").exists()


def test_table_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["table", "1"]) == 0
    assert "6.86  6.86" in capsys.readouterr().out


def test_a_data_file_for_one_task(
    arguments: list[str],
    row: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row's file is named alone, from its folder, whose name is in that of its results."""
    monkeypatch.chdir(row.parent)
    arguments[2] = row.name
    file = tmp_path / "texts.tsv"
    file.write_text("a map\teine Karte\nan editor\tein Editor\n")
    assert cli.main([*arguments, "--data_file", f"debian_ende={file}"]) == 0
    (record,) = records.read(tmp_path / "out" / "records.jsonl")
    assert record.num_examples == 2
    assert [e["source"] for e in examples(tmp_path / "out")] == [
        "translate English to German: a map",
        "translate English to German: an editor",
    ]


@pytest.mark.long
def test_random_weights_at_true_sizes(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the paper with smaller models: every output says what was simulated."""
    from speculative.models import SIZES, T5Config

    tiny = T5Config(64, 8, 2, 4, 16, 1, 1)
    monkeypatch.setitem(SIZES, "t5_1_1_xxl", tiny)
    monkeypatch.setitem(SIZES, "t5_1_1_small", tiny)
    file = CONFIGS / "runs" / "table2" / "ende_small_t0.gin"
    arguments = ["run", "--gin_file", str(file), "--weights=random", "--simulated_alpha=0.75"]
    arguments += ["--limit=2", "--dtype=float32", "--output_dir", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert "simulated acceptance" in capsys.readouterr().out
    (record,) = records.read(tmp_path / "records.jsonl")
    assert record.simulated_alpha == 0.75
    assert (record.gamma, record.num_tokens, record.paper_speedup) == (7, 2 * 128, 3.4)


def test_a_table_with_the_papers_own_acceptance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of Tables 2 and 4 gets its own alpha; bindings change all rows, and no others."""
    asked: dict[str, RowConfig] = {}
    monkeypatch.setattr(sweep, "run", lambda configs, folder: asked.update(configs) or [])
    arguments = ["table", "2", "--weights=random", "--gin", 'RowConfig.target = "t5_1_1_base"']
    assert cli.main([*arguments, "--simulated_alpha=paper"]) == 0
    printed = {
        (row.task, row.draft, row.temperature): (row.alpha, row.gamma)
        for row in paper.TABLES_2_AND_4
    }
    assert len(asked) == len(printed) == 12
    for config in asked.values():
        place = config.texts.paper or "", config.paper_draft or "", config.temperature
        assert (config.simulated_alpha, config.gamma) == printed[place]
        assert config.target == "t5_1_1_base"
    file = str(CONFIGS / "runs" / "table3.gin:debian_lm_suffix_t0")
    assert cli.main(["run", "--gin_file", file, "--simulated_alpha=paper"]) == 2
    assert "The paper has no alpha for debian_lm with suffix" in capsys.readouterr().err


def test_the_papers_order() -> None:
    names = [experiment(row) for row in sweep.rows("2")]
    assert names[:3] == ["table2/ende_small_t0", "table2/ende_base_t0", "table2/ende_large_t0"]
    assert names[11] == "table2/cnndm_large_t1"
    assert len(names) == 16
    names = [experiment(row).removeprefix("table5/") for row in sweep.rows("5")]
    assert names[:5] == [f"ende_small_t0_{at}" for at in ("l1", "l05", "l03", "l01")] + [
        "ende_unigram_t1_l1"
    ]
    assert (names[19], names[20], names[27]) == (
        "ende_base_t1_l01",
        "debian_ende_t0_l1",
        "debian_ende_t1_l01",
    )


def about(arguments: list[str], command: str, *more: str) -> list[str]:
    """The arguments of `run` for another command."""
    return [command, *arguments[1:5], *more]


@pytest.mark.parametrize(
    ("verify", "verdict"),
    [
        (2.0, "Best: γ = 10, "),
        (60.0, "Speculation will not pay here. The wide pass costs too much"),
    ],
)
def test_tune_tells_the_best_gamma(
    verify: float,
    verdict: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guesses are free: where a wide pass costs what a narrow one does, the most win."""
    gammas = range(1, 11)
    costs = Costs(0.0, 0.0, 2.0, dict.fromkeys(gammas, verify), dict.fromkeys(gammas, 0.0))
    made.no_timing(monkeypatch, costs)
    assert cli.main(about(arguments, "tune", "--limit=2")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Theorem 3.8" in said
    assert verdict in said
    assert ("Best: γ = 10, " in said) == (verify == 2)


@pytest.mark.long
def test_verify_tells_its_verdict(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--limit=3", "--samples=100")
    assert cli.main(about(arguments, "verify", *more)) == 0
    assert capsys.readouterr().out.startswith("PASSED: 303 texts of 3 prompts")
    assert cli.main(about(arguments, "verify", *more, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["prompts"]) == (True, 3)
    assert cli.main(about(arguments, "verify", "--gin=RowConfig.lenience = 0.5")) == 2
    assert (
        "Lenient outputs are not the target's own, and lenience is 0.5" in capsys.readouterr().err
    )
