"""Prompts from the package, from seqio and from local files, against strings written by hand."""

import dataclasses
import json
import pathlib
import types
from typing import Any

import pytest

from speculative import checkpoints, tasks
from speculative.tasks import Task
from speculative.tasks.prompts import Prompt, load_prompts, require

GERMAN = "translate English to German: "
OWN = Task("own", "Do: ")


def of_file(task: str, data: str) -> list[Prompt]:
    """The prompts that a file holds for a task."""
    return load_prompts(dataclasses.replace(tasks.task(task), data=data))


@pytest.mark.parametrize(
    ("task", "least", "prefix"),
    [("debian_ende", 40, GERMAN), ("debian_synopsis", 20, "summarize: ")],
)
def test_the_shipped_prompts(task: str, least: int, prefix: str) -> None:
    prompts = load_prompts(task)
    assert len(prompts) >= least
    assert len({prompt.source for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.source.startswith(prefix)
        assert len(prompt.source) > len(prefix) + 20
        assert prompt.reference.strip()


def test_a_limit_keeps_the_first() -> None:
    assert load_prompts("debian_ende", 3) == load_prompts("debian_ende")[:3]


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, content: str | bytes) -> str:
        raw = content.encode() if isinstance(content, str) else content
        pathlib.Path(name).write_bytes(raw)
        return name

    return call


# Characters that are no line's end: U+2028, a vertical tab, a form feed, U+0085.
ODD = "one\u2028two\x0bthree\x0cfour\x85five"


def test_tab_separated_text(write) -> None:
    file = write("ende.tsv", f"Go on.\tWeiter.\n{ODD}\tÜbung\r\nno end\t")
    expected = [
        Prompt(GERMAN + "Go on.", "Weiter."),
        Prompt(GERMAN + ODD, "Übung"),
        Prompt(GERMAN + "no end", ""),
    ]
    assert of_file("wmt_t2t_ende_v003", file) == expected


def test_parallel_text(write) -> None:
    # As editors on Windows write it: a mark at the beginning, two characters at a line's end.
    sources = write("news.en", b"\xef\xbb\xbfGo on.\r\n" + ODD.encode() + b"\r\n")
    references = write("news.de", "Weiter.\n\n")
    assert of_file("debian_ende", f"{sources},{references}") == [
        Prompt(GERMAN + "Go on.", "Weiter."),
        Prompt(GERMAN + ODD, ""),
    ]


def test_lines_of_json(write) -> None:
    rows = [
        {"id": 1, "article": "(CNN)Rain .\nMore", "highlights": "It rains .\nStill ."},
        {"inputs": "a", "targets": "b", "article": "without highlights"},
        {"reference": ODD, "source": "c"},
    ]
    file = write("a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert of_file("cnn_dailymail_v002", file) == [
        Prompt("summarize: (CNN)Rain .\nMore", "It rains .\nStill ."),
        Prompt("summarize: a", "b"),
        Prompt("summarize: c", ODD),
    ]


def test_a_task_without_sources(write) -> None:
    file = write("lm1b.tsv", "\tThe boat sank .\n")
    assert of_file("lm1b", file) == [Prompt("", "The boat sank .")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "", "a.tsv is empty"),
        ("a.tsv", " \n", "a.tsv is empty"),
        ("a.tsv", "a\tb\n \tc\n", "Line 2 of a.tsv has an empty source"),
        ("a.tsv", "a\tb\nc\n", "Line 2 of a.tsv has 1 column, not 2; .* one tab"),
        ("a.tsv", "a\tb\tc\n", "Line 1 of a.tsv has 3 columns, not 2"),
        ("a.tsv", b"a\tb\nc\tgr\xfcn\n", "Line 2 of a.tsv is not UTF-8"),
        ("a.jsonl", '{"source": "a", "reference": "b"}\n\n', "Line 2 of a.jsonl is no JSON .*"),
        ("a.jsonl", '["a", "b"]', r"Line 1 of a.jsonl is no JSON object but '\[\"a\", \"b\"\]'"),
        (
            "a.jsonl",
            '{"article": "a", "targets": "b"}',
            "Line 1 of a.jsonl has the columns article, targets; it needs article and "
            "highlights, or inputs and targets, or source and reference",
        ),
        ("a.jsonl", '{"source": "\\ud800", "reference": "b"}', "Line 1 of a.jsonl is no JSON"),
        ("a.jsonl", "[" * 100_000, "Line 1 of a.jsonl is no JSON"),
        ("a.jsonl", "{}", "Line 1 of a.jsonl has the columns none; it needs"),
        ("a.jsonl", '{"source": 3, "reference": "b"}', "Line 1 of a.jsonl has 3 as source"),
        ("a.jsonl", '{"inputs": "", "targets": "b"}', "Line 1 of a.jsonl has an empty source"),
    ],
)
def test_malformed_files_are_placed(name: str, content: str | bytes, message: str, write) -> None:
    with pytest.raises(ValueError, match=message):
        of_file("debian_synopsis", write(name, content))


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.tsv", "x\ty\n1\t2\n", "t,u", "Line 1 of a.tsv has no column 't'; it has x, y"),
        ("a.tsv", "x\ty\n1\n", "x,y", "Line 2 of a.tsv has 1 columns, the first line 2"),
        ("a.tsv", "x\ty\n", "x,y", "a.tsv names columns, but has no line after them"),
        ("a.jsonl", '{"x": "a"}\n{"y": ""}', "x", "Line 2 of a.jsonl has no column 'x'; it has y"),
        ("a.jsonl", '{"x": 1}\n', "x", "Line 1 of a.jsonl has 1 as x"),
        ("a.jsonl", "{}\n", "x,y,z", "SOURCE,REFERENCE or SOURCE, not 'x,y,z'"),
        ("a.jsonl", "{}\n", ",y", "SOURCE,REFERENCE or SOURCE, not ',y'"),
    ],
)
def test_wrong_columns(name: str, content: str, columns: str, message: str, write) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(dataclasses.replace(OWN, data=write(name, content), columns=columns))


def test_parallel_files_of_unequal_length(write) -> None:
    write("a.en", "a\nb\nc\n")
    write("a.de", "x\ny")
    expected = "a.en has 3 lines and a.de has 2, but they must be parallel; a.de lacks line 3"
    with pytest.raises(ValueError, match=expected):
        of_file("debian_ende", "a.en,a.de")
    with pytest.raises(ValueError, match="a.de lacks line 3"):
        of_file("debian_ende", "a.de,a.en")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("none.tsv", "There is no file 'none.tsv'"),
        ("folder.jsonl", "There is no file 'folder.jsonl'"),
        ("a.tsv,b,c", "There is no file 'b,c'"),
        (",a.tsv", "There is no file ''"),
        ("", "'' is no known kind of data file"),
        ("a.csv", "'a.csv' is no known kind .*FILE.tsv .*FILE.jsonl .*SOURCES,REFERENCES"),
    ],
)
def test_missing_files(file: str, message: str, write) -> None:
    write("a.tsv", "a\tb\n")
    pathlib.Path("folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=message):
        of_file("debian_ende", file)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_1(limit: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, not {limit}"):
        load_prompts("debian_ende", limit)


def test_named_columns(write) -> None:
    table = write("a.tsv", f"id\ttitle\ttext\n1\tÜber\t{ODD}\n2\t\tb\n")
    task = dataclasses.replace(OWN, data=table, columns="text, title")
    assert load_prompts(task) == [Prompt(f"Do: {ODD}", "Über"), Prompt("Do: b", "")]
    assert {prompt.prefix for prompt in load_prompts(task)} == {"Do: "}
    lines = write("a.jsonl", '{"text": "a", "id": 1, "title": "t"}\n{"text": "b", "title": ""}\n')
    task = dataclasses.replace(OWN, data=lines, columns="text,title")
    assert load_prompts(task) == [Prompt("Do: a", "t"), Prompt("Do: b", "")]
    for file in (table, lines):
        alone = dataclasses.replace(OWN, data=file, columns="text")
        assert [prompt.reference for prompt in load_prompts(alone)] == ["", ""]


def test_sources_alone(write) -> None:
    task = dataclasses.replace(OWN, data=write("a.txt", f"a\tb\n{ODD}\r\n"))
    assert load_prompts(task) == [Prompt("Do: a\tb", ""), Prompt(f"Do: {ODD}", "")]
    write("a.txt", "a\n\nb\n")
    for prefix in ("", "Do: "):
        with pytest.raises(ValueError, match="Line 2 of a.txt has an empty source"):
            load_prompts(dataclasses.replace(task, prefix=prefix))


@pytest.mark.filterwarnings("ignore")
def test_prompts_of_a_dataset_in_tfds(stored, tmp_path, monkeypatch) -> None:
    from tensorflow_datasets.core.utils import file_utils

    monkeypatch.setattr(file_utils, "list_data_dirs", lambda *_, **__: [str(tmp_path)])
    task = Task("own", "Do: ", data="tfds:cnn_dailymail:3.4.0", columns="article,publisher")
    with pytest.raises(ValueError, match=r"name its columns \(--columns\)"):
        load_prompts(dataclasses.replace(task, columns=None))
    assert sorted(prompt.source for prompt in load_prompts(task)) == [
        "Do: A man – bit\na dog . Twice.",
        "Do: Rain",
    ]
    assert {prompt.reference for prompt in load_prompts(task)} == {"cnn", "dm"}
    for changes, said in (
        ({"columns": "text"}, "has no column 'text'; it has article"),
        ({"split": "dev"}, "has no split dev; it has .*train"),
        ({"data": "tfds:nothing"}, "cannot be read .*nothing"),
    ):
        with pytest.raises(ValueError, match=said):
            load_prompts(dataclasses.replace(task, **changes))


@pytest.mark.filterwarnings("ignore")
def test_prompts_of_a_task_in_tfds(stored) -> None:
    found = load_prompts("cnn_dailymail_v002")
    assert sorted(found, key=lambda prompt: prompt.source) == [
        Prompt("summarize: A man – bit\na dog . Twice.", "Man bites dog .\nTwice ."),
        Prompt("summarize: Rain", "It rains ."),
    ]
    assert load_prompts("cnn_dailymail_v002", 1) == found[:1]
    # A language model goes on from the first half of a text.
    assert {(prompt.source, prompt.reference) for prompt in load_prompts("lm1b")} == {
        ("The boat", "sank ."),
        ("Prices", "rose ."),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("empty", ["", "  \n "])
def test_an_empty_text_of_tfds_or_seqio_is_named(stored, monkeypatch, empty: str) -> None:
    import tensorflow as tf
    import tensorflow_datasets

    rows: Any = {"article": ["a", "b", "c", empty, "d"], "highlights": ["x", "", "y", "z", ""]}
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    source = tasks.get_task("cnn_dailymail_v002").source
    monkeypatch.setattr(source, "get_dataset", lambda split, **_: dataset)
    said = "Example 4 of task 'cnn_dailymail_v002' has an empty source; give a text."
    with pytest.raises(ValueError, match=f"^{said}"):
        load_prompts("cnn_dailymail_v002")
    found = load_prompts("cnn_dailymail_v002", 3)
    assert found[2].place == "Example 3 of task 'cnn_dailymail_v002'"
    with pytest.raises(ValueError, match="^Example 2 of task .* has no reference, so .* by bleu"):
        require(found, "bleu")

    class Builder:
        info = types.SimpleNamespace(splits=["test"])
        download_and_prepare = as_dataset = staticmethod(lambda *_, **__: dataset)

    monkeypatch.setattr(tensorflow_datasets, "builder", lambda _: Builder)
    of_tfds = Task("own", "Do: ", data="tfds:news", columns="article,highlights")
    with pytest.raises(ValueError, match="^Example 4 of tfds:news has an empty source"):
        load_prompts(of_tfds)
    # Without a prefix a decoder-only target may go on from nothing to a reference.
    found = load_prompts(dataclasses.replace(of_tfds, prefix=""))
    require(found, decoder_only=True)
    with pytest.raises(ValueError, match="^Example 4 of tfds:news has an empty source"):
        require(found)
    rows["article"][1] = "Straße".encode("latin-1")
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    with pytest.raises(ValueError, match="^Example 2 of tfds:news is not UTF-8"):
        load_prompts(of_tfds)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("texts", "number"), [(["a", "", "b"], 2), (["", "", "b"], 1)])
def test_some_sources_of_a_task_of_seqio_are_missing(seqio, texts: list[str], number: int) -> None:
    """Only where all are is it a language model's, which goes on from half of its texts."""
    import tensorflow as tf

    name = f"some_{number}"
    pieces = seqio.SentencePieceVocabulary(str(checkpoints.ASSETS / "debian.model"))
    rows: Any = {"inputs": texts, "targets": ["one two"] * 3}
    source = seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(rows),
        splits=["test"],
    )
    feature = seqio.Feature(pieces, dtype=tf.int32)
    steps = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    features = {"inputs": feature, "targets": feature}
    seqio.TaskRegistry.add(name, source=source, preprocessors=steps, output_features=features)
    with pytest.raises(ValueError, match=f"^Example {number} of task '{name}' has an empty source"):
        load_prompts(name)


@pytest.mark.filterwarnings("ignore")
def test_no_more_of_a_split_is_read_than_asked_for(stored, monkeypatch) -> None:
    import tensorflow as tf

    rows = tf.data.Dataset.range(10**15).map(lambda i: {"text": tf.strings.as_string(i)})
    source = tasks.get_task("lm1b").source
    monkeypatch.setattr(source, "get_dataset", lambda split, **_: {"test": rows}[split])
    references = [prompt.reference for prompt in load_prompts("lm1b", 600)]
    assert references == [str(i) for i in range(600)]


@pytest.mark.filterwarnings("ignore")
def test_a_split_that_cannot_be_read(stored, monkeypatch) -> None:
    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tasks.get_task("lm1b").source, "get_dataset", fail)
    message = r"test split of task 'lm1b' .*ConnectionError: no route.*TFDS_DATA_DIR.*FILE.tsv"
    with pytest.raises(ValueError, match=message):
        load_prompts("lm1b")
