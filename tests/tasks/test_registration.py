"""Tasks on TFDS: strings written by hand, SentencePiece itself, and no network."""

import functools
import pathlib
from typing import Any

import pytest
import sentencepiece

from scripts import export_tokenized
from speculative import checkpoints, tasks
from speculative.measurement import quality
from speculative.training import data
from speculative.vocabulary import SentencePiece

# TensorFlow and its companions warn of their own affairs.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("seqio")]

TEXTS = {
    "wmt_t2t_ende_v003": {
        ("translate English to German: That is good.", "Das ist gut."),
        ("translate English to German: Go", "Los, Übung"),
    },
    "cnn_dailymail_v002": {
        ("summarize: A man – bit\na dog . Twice.", "Man bites dog .\nTwice ."),
        ("summarize: Rain", "It rains ."),
    },
    "lm1b": {("", "The boat sank ."), ("", "Prices rose .")},
}


@pytest.mark.parametrize(
    ("task", "name", "metrics"),
    [
        ("wmt_t2t_ende_v003", "wmt_t2t_translate/de-en:1.0.0", [quality.bleu]),
        ("cnn_dailymail_v002", "cnn_dailymail:3.4.0", [quality.rouge]),
        ("lm1b", "lm1b:1.1.0", []),
    ],
)
def test_a_stored_dataset(task: str, name: str, metrics: list[Any], stored) -> None:
    """What seqio knows of it, its text and its tokens."""
    registered = tasks.get_task(task)
    assert registered.source.tfds_dataset.name == name  # type: ignore[attr-defined]
    assert tasks.TASKS[task].split in registered.splits
    assert registered.metric_fns == metrics
    for key, feature in registered.output_features.items():
        assert feature.add_eos == (key == "targets" or task != "lm1b")
        assert feature.dtype.name == "int32"
        assert feature.vocabulary.extra_ids == 100
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(checkpoints.ASSETS / "debian.model")
    )
    found = set()
    for example in registered.get_dataset(None, split="test", shuffle=False).as_numpy_iterator():
        texts = tuple(example[f"{key}_pretokenized"].decode() for key in ("inputs", "targets"))
        for key, text in zip(("inputs", "targets"), texts, strict=True):
            # An input that is left out has no end-of-sequence token either.
            assert example[key].tolist() == ([*pieces.encode(text), 1] if text else [])
        found.add(texts)
    assert found == TEXTS[task]


@pytest.mark.parametrize("split", ["train", "test"])
def test_t5s_own_tasks_are_exported_cut(
    split: str, stored, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training too, where T5 cuts articles; a task of ours would leave them out."""
    monkeypatch.setattr(export_tokenized, "T5_LENGTHS", {"inputs": 8, "targets": 500})
    path = tmp_path / "articles.npz"
    assert export_tokenized.export("cnn_dailymail_v002", split, path) == (2, 0)
    exported = data.load(path)
    vocabulary = SentencePiece(checkpoints.ASSETS / "debian.model")
    found = {(tuple(exported[i][0].tolist()), tuple(exported[i][1].tolist())) for i in range(2)}
    expected = set()
    for source, target in TEXTS["cnn_dailymail_v002"]:
        tokens = vocabulary.encode(source).tolist()
        tokens = tokens if len(tokens) <= 8 else [*tokens[:7], 1]
        expected.add((tuple(tokens), tuple(vocabulary.encode(target).tolist())))
    assert found == expected


def test_columns_become_text() -> None:
    import tensorflow as tf

    from speculative.tasks.registration import to_text

    columns: Any = {"a": ["ä b", ""], "b": ["x", "y"], "c": [1, 2]}
    dataset = tf.data.Dataset.from_tensor_slices(columns)
    made = functools.partial(to_text, dataset, "go: ", targets="b")
    assert list(made("a").as_numpy_iterator()) == [
        {"inputs": "go: ä b".encode(), "targets": b"x"},
        {"inputs": b"go: ", "targets": b"y"},
    ]
    assert [example["inputs"] for example in made(None).as_numpy_iterator()] == [b"go: "] * 2


def test_a_task_of_t5s_library_stands(seqio) -> None:
    """T5X users have imported it, and seqio refuses a name twice."""
    from speculative.tasks.registration import register

    kept = tasks.get_task("debian_ende")
    register("debian_ende", None, seqio.PassThroughVocabulary(9), inputs=None, targets="text")
    assert tasks.get_task("debian_ende") is kept


def test_the_vocabulary_is_t5s_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculative.tasks.registration import t5_vocabulary

    monkeypatch.delenv("SPECULATIVE_T5_VOCABULARY", raising=False)
    vocabulary = t5_vocabulary()
    address = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
    assert (vocabulary.sentencepiece_model_file, vocabulary.extra_ids) == (address, 100)
    monkeypatch.setenv("SPECULATIVE_T5_VOCABULARY", "/no/such.model")
    with pytest.raises(ValueError, match="SPECULATIVE_T5_VOCABULARY names '/no/such.model'"):
        t5_vocabulary()
