"""Rows of the command line: a pair and texts of the user's, without a gin file."""

import json
import pathlib
import re
from typing import Any

import pytest

from speculative import checkpoints, cli, loading, tasks
from speculative.checkpoints import Checkpoint
from speculative.commands import rows
from speculative.rows import records
from speculative.rows.config import RowConfig
from speculative.studies import bench, sweep
from tests import saved

COMMANDS = ("run", "tune", "verify", "bench")
RUN = ["run", "--target=big", "--draft=small", "--gamma=2", "--max_length=8"]
RUN += ["--gin", "RowConfig.rounds = 1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A pair in Hugging Face's format, and texts."""
    folder = tmp_path_factory.mktemp("own")
    for seed, (name, config) in enumerate({"big": saved.TARGET, "small": saved.TARGET}.items()):
        saved.save(folder / "native" / name, config, seed)
        checkpoints.convert(folder / "native" / name, folder / name, "huggingface")
    (folder / "texts.tsv").write_text("a map\teine Karte\nan editor\tein Editor\n")
    (folder / "alone.txt").write_text("a map\nan editor\n")
    (folder / "lacks.tsv").write_text("a map\teine Karte\nan editor\t\n")
    (folder / "named.tsv").write_text("a\tb\na map\teine Karte\nan editor\t\n")
    (folder / "empty.tsv").write_text("a map\teine Karte\n \tein Editor\n")
    (folder / "other.tsv").write_text("a map\t地図\nan editor\tエディタ 2026\n")
    (folder / "named.jsonl").write_text('{"text": "a map", "title": "map"}\n')
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name and the row of which a command is."""
    found: dict[str, Any] = {}

    def notes(name: str | None, config: RowConfig) -> Any:
        found.update(name=name, config=config)
        raise ValueError("asked")

    monkeypatch.setattr(sweep, "run", lambda rows, _: notes(*next(iter(rows.items()))))
    monkeypatch.setattr(sweep, "tuning", lambda config: notes(None, config))
    monkeypatch.setattr(sweep, "verify", lambda config, *_: notes(None, config))
    monkeypatch.setattr(bench, "resolve", lambda *_: None)
    monkeypatch.setattr(bench, "bench", lambda config, *_: notes(None, config))

    def call(command: str, *more: str) -> tuple[str | None, RowConfig]:
        found.clear()
        cli.main([command, *more])
        return found["name"], found["config"]

    return call


FLAGS = {
    "target": "big",
    "draft": "small",
    "dtype": "bfloat16",
    "data_file": "named.jsonl",
    "columns": "text,title",
    "prefix": "Do: ",
    "metric": "rouge",
    "gamma": 3,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "verification": "token",
    "lenience": 0.5,
    "max_length": 40,
    "limit": 9,
    "seed": 4,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_flags_everywhere(command: str, asked: Any) -> None:
    _, config = asked(command, *(f"--{name}={value}" for name, value in FLAGS.items()))
    fields = {"num_examples" if name == "limit" else name: FLAGS[name] for name in FLAGS}
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.task == "own"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_said_is_as_in_generate(command: str, asked: Any) -> None:
    name, config = asked(command, "--target=big", "--draft=copy", "--data_file=alone.txt")
    assert (config.temperature, config.top_k, config.top_p, config.gamma) == (0.0, 0, 1.0, 5)
    assert (config.task, config.texts.prefix, config.texts.metric) == ("own", "", None)
    assert config.max_length == (64 if command == "bench" else 128)
    assert name == ("own/big-copy-t0" if command == "run" else None)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_row_it_is_the_shipped_one(command: str, asked: Any) -> None:
    _, config = asked(command, "--gamma=3")
    assert (config.task, config.target, config.gamma) == ("debian_ende", "debian_target", 3)
    _, config = asked(command, "--target=debian_lm")
    assert (config.task, config.draft) == ("debian_lm", loading.DRAFTS["debian_lm"])


def test_flags_change_a_file_and_bindings_change_flags(asked: Any, folder: pathlib.Path) -> None:
    (folder / "row.gin").write_text(
        'RowConfig.task = "debian_ende"\nRowConfig.target = "big"\nRowConfig.draft = "copy"\n'
        "RowConfig.temperature = 1.0\nRowConfig.gamma = 2\nRowConfig.top_k = 5\n"
    )
    more = ["--gin_file=row.gin", "--gamma=3", "--top_k=6", "--gin", "RowConfig.top_k = 8"]
    name, config = asked("run", *more)
    assert (config.temperature, config.gamma, config.top_k) == (1.0, 3, 8)
    assert name == f"{folder.name}/row"


@pytest.mark.long
def test_from_two_folders_and_a_file_to_a_record_and_a_report(folder: pathlib.Path) -> None:
    out = folder / "out"
    texts = ["--data_file=texts.tsv", "--prefix=Do: ", "--metric=rouge"]
    assert cli.main([*RUN, *texts, "--output_dir", str(out)]) == 0
    (record,) = records.read(out / "records.jsonl")
    assert (record.experiment, record.task, record.metric) == ("own/big-small-t0", "own", "rouge")
    assert record.num_examples == record.outputs_identical == 2
    assert record.quality_autoregressive == record.quality_speculative
    lines = (out / "rows" / "own" / "big-small-t0" / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in lines] == ["Do: a map", "Do: an editor"]
    page = (out / "report.html").read_text()
    assert "big-small-t0" in page and "eine Karte" in page
    assert "<dt>prefix</dt><dd>Do: </dd>" in page and "<dt>source</dt><dd>a map</dd>" in page
    alone = folder / "alone"
    assert cli.main([*RUN, "--data_file=alone.txt", "--output_dir", str(alone)]) == 0
    assert "<dt>prefix</dt>" not in (alone / "report.html").read_text()
    (record,) = records.read(alone / "records.jsonl")
    assert (record.metric, record.quality_speculative) == (None, None)
    lines = (alone / "rows" / "own" / "big-small-t0" / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in lines] == ["a map", "an editor"]


MODULE = """
import speculative.tasks
speculative.tasks.register(
    speculative.tasks.Task("titles", "Title: ", "rougeL", "named.jsonl", "text,title")
)
"""


def test_a_task_that_a_module_registers(asked: Any, folder: pathlib.Path) -> None:
    (folder / "my_titles.py").write_text(MODULE)
    pair = ["--target=big", "--draft=small"]
    _, config = asked("run", *pair, "--module=my_titles", "--task=titles")
    assert (config.texts.prefix, config.texts.metric) == ("Title: ", "rougeL")
    _, config = asked("run", *pair, "--module=my_titles", "--task=titles", "--prefix=")
    assert (config.texts.prefix, config.texts.data) == ("", "named.jsonl")


SEQIO = """
import seqio
import tensorflow as tf
from speculative.tasks.debian import VOCABULARY

pieces = seqio.SentencePieceVocabulary(str(VOCABULARY), extra_ids=0)
feature = seqio.Feature(pieces)
rows = {"inputs": ["Echo: one", "Echo: two"], "targets": ["one", "two"]}
seqio.TaskRegistry.add(
    "my_echo",
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files: tf.data.Dataset.from_tensor_slices(rows),
        splits=("validation",),
    ),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={"inputs": feature, "targets": feature},
)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_task_of_seqio(folder: pathlib.Path) -> None:
    pytest.importorskip("seqio", exc_type=ImportError)
    (folder / "my_seqio.py").write_text(SEQIO)
    out = folder / "seqio"
    of_task = ["--module=my_seqio", "--task=my_echo", "--metric=bleu"]
    assert cli.main([*RUN, *of_task, "--output_dir", str(out)]) == 0
    (record,) = records.read(out / "records.jsonl")
    assert (record.experiment, record.metric) == ("my_echo/big-small-t0", "bleu")
    (file,) = (out / "rows").rglob("examples.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["source"], each["reference"]) for each in found] == [
        ("Echo: one", "one"),
        ("Echo: two", "two"),
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--metric=bleu", "--data_file=alone.txt"], "Line 1 of alone.txt has no reference, so"),
        (["--task=debian_ende", "--data_file=lacks.tsv"], "Line 2 of lacks.tsv has no reference"),
        (["--task=debian_ende", "--data_file=named.tsv", "--columns=a,b"], "Line 3 of named.tsv"),
        (["--data_file=empty.tsv"], "Line 2 of empty.tsv has an empty source; give a text."),
        (["--metric=rouge", "--data_file=other.tsv"], r"ROUGE \(rouge\) sees only the letters"),
        (["--metric=meteor", "--data_file=texts.tsv"], "one of bleu, rouge, .*, not 'meteor'"),
        (["--columns=text,summary", "--data_file=named.jsonl"], "no column 'summary'; it has text"),
        ([], "Task 'own' has no texts; give a data file: FILE.tsv"),
        (["--module=no_such", "--task=titles"], "'no_such' cannot be imported .*No module"),
        (["--data_file=tfds:none"], r"name its columns \(--columns\)"),
    ],
)
def test_wrong_texts_are_told_before_a_tensor_is_read(
    more: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor first"))
    assert cli.main(["run", "--target=big", "--draft=small", *more]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(said, err), err


@pytest.mark.parametrize(
    "platform, more, nodes",
    [
        ("tpu", (), 63),
        ("gpu", (), 15),
        ("cpu", (), 0),
        ("tpu", ("--gamma=1",), 8),  # As many as a first guess may have.
        ("gpu", ("--gamma=20",), 20),
        ("tpu", ("--draft=copy",), 0),
        ("tpu", ("--temperature=1",), 0),
        ("tpu", ("--temperature=1", "--verification=coupled"), 63),
        ("tpu", ("--quantize=int8",), 31),
    ],
)
def test_the_usual_tree_of_a_device(
    platform: str, more: tuple[str, ...], nodes: int, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "FREE", {"cpu": rows.FREE[platform]} if platform != "cpu" else {})
    assert asked(*RUN, "--data_file=texts.tsv", "--tree=auto", "--gamma=7", *more)[1].tree == nodes


def test_rows_of_a_table_with_the_usual_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(sweep, "run", lambda configs, _: found.append(list(configs)))
    table = ["table", "2", "--checkpoints=demo", "--tree=auto", "--output_dir=none"]
    cli.main(table)
    monkeypatch.setattr(rows, "FREE", {"cpu": (15, 7)})
    cli.main(table)
    chains, both = found
    assert not [name for name in chains if "_tree" in name]
    assert [name for name in both if not name.endswith("_tree15")] == chains
    trees = [name for name in both if name.endswith("_tree15")]
    assert trees
    assert all(both[both.index(name) - 1] == name.removesuffix("_tree15") for name in trees)
