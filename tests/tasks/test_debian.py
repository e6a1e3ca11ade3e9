"""The seqio tasks against SentencePiece itself, on a corpus of a few lines."""

import json
import pathlib
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import sentencepiece

from scripts import export_tokenized
from speculative import tasks

PREFIX = {
    "debian_ende": "translate English to German: ",
    "debian_synopsis": "summarize: ",
}
TEXTS = {
    "debian_ende": [
        ("This package contains the tools.", "Dieses Paket enthält die Werkzeuge."),
        ("a fast editor", "ein schneller Editor für große Übungen"),
        ("It plays music.", "Es spielt Musik."),
        ("no limits " * 200, "lang"),
    ],
    "debian_synopsis": [
        ("Audacity is an editor for sound. It is fast.", "fast sound editor"),
        ("A game in which you jump over a 🎉.", "jumping game"),
    ],
}

# TensorFlow and its companions warn of their own affairs.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("seqio")]


@pytest.fixture(scope="module")
def debian(seqio):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from speculative.tasks import debian

    return debian


@pytest.fixture(scope="module")
def pieces(debian) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(debian.VOCABULARY))


@pytest.fixture
def data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for task, texts in TEXTS.items():
        (tmp_path / task).mkdir()
        for split in ("train", "validation", "test"):
            with (tmp_path / task / f"{split}.jsonl").open("w") as file:
                for inputs, targets in texts:
                    record = {"inputs": inputs, "targets": targets, "package": "p"}
                    file.write(json.dumps(record) + "\n")
    monkeypatch.setenv("SPECULATIVE_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("task", sorted(PREFIX))
def test_tokens_are_prefixed_text_and_eos(task: str, data, pieces) -> None:
    registered = tasks.get_task(task)
    dataset = registered.get_dataset(None, split="test", shuffle=False)
    for example, (inputs, targets) in zip(dataset.as_numpy_iterator(), TEXTS[task], strict=True):
        assert example["inputs"].tolist() == [*pieces.encode(PREFIX[task] + inputs), 1]
        assert example["targets"].tolist() == [*pieces.encode(targets), 1]


def test_vocabulary_has_t5_ids_and_no_unknown(debian, pieces) -> None:
    ids = [pieces.pad_id(), pieces.eos_id(), pieces.unk_id(), pieces.bos_id()]
    assert ids == [0, 1, 2, -1]
    text = "Größe, Übung, Äpfel, Öl, Maß: »Zitat« „x“ – 🎉 日本"
    encoded = pieces.encode(text)
    assert 2 not in encoded
    assert pieces.decode(encoded) == text


def test_train_mixes_in_extra_text(data: pathlib.Path, debian) -> None:
    record = {"inputs": "open a file", "targets": "eine Datei öffnen", "package": "p"}
    (data / "debian_ende" / "extra.jsonl").write_text(json.dumps(record) + "\n")
    found = debian.read_examples("debian_ende", "train")
    assert found == [*TEXTS["debian_ende"], ("open a file", "eine Datei öffnen")]
    assert debian.read_examples("debian_ende", "test") == TEXTS["debian_ende"]


def batches(size: int, lengths: dict[str, int], pack: bool) -> Iterator[dict[str, np.ndarray]]:
    """Test translations as seqio itself converts them for an encoder-decoder."""
    import seqio

    tasks.get_task("debian_ende")  # Asking for it registers it.
    dataset = seqio.get_dataset(
        "debian_ende",
        task_feature_lengths=lengths,
        dataset_split="test",
        shuffle=False,
        feature_converter=seqio.EncDecFeatureConverter(pack=pack),
    )
    yield from dataset.batch(size).as_numpy_iterator()


def test_batches_shift_targets_and_mask_padding(data, pieces) -> None:
    # Unpacked, seqio shifts the padded row as a whole: EOS follows as an input of no weight.
    batch = next(batches(2, {"inputs": 32, "targets": 16}, pack=False))
    expected = [[*pieces.encode(targets), 1] for _, targets in TEXTS["debian_ende"][:2]]
    for row, tokens in enumerate(expected):
        padding = [0] * (16 - len(tokens))
        assert batch["decoder_target_tokens"][row].tolist() == tokens + padding
        assert batch["decoder_input_tokens"][row].tolist() == [0, *tokens, *padding[1:]]
        assert batch["decoder_loss_weights"][row].tolist() == [1] * len(tokens) + padding
    assert batch["encoder_input_tokens"].shape == (2, 32)


def test_packing_keeps_every_token(data, pieces) -> None:
    (batch,) = batches(1, {"inputs": 1024, "targets": 256}, pack=True)
    for row in range(4):
        tokens = batch["decoder_target_tokens"][batch["decoder_segment_ids"] == row + 1].tolist()
        assert tokens == [*pieces.encode(TEXTS["debian_ende"][row][1]), 1]


def test_export_holds_all_but_overlong_training_pairs(data, pieces) -> None:
    path = data / "tokens" / "train.npz"
    assert export_tokenized.export("debian_ende", "train", path) == (3, 1)
    arrays = np.load(path)
    assert arrays["inputs"].dtype == np.int16
    for name, side, prefix in (("inputs", 0, PREFIX["debian_ende"]), ("targets", 1, "")):
        tokens, offsets = arrays[name], arrays[f"{name}_offsets"]
        assert len(offsets) == 4 and offsets[-1] == len(tokens)
        for i in range(3):
            text = prefix + TEXTS["debian_ende"][i][side]
            assert tokens[offsets[i] : offsets[i + 1]].tolist() == [*pieces.encode(text), 1]
    assert export_tokenized.export("debian_ende", "test", path) == (4, 0)
    offsets = np.load(path)["inputs_offsets"]
    assert offsets[-1] - offsets[-2] == export_tokenized.MAX_LENGTHS["inputs"]


def test_missing_corpus_names_the_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, debian
) -> None:
    monkeypatch.setenv("SPECULATIVE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere.*build_debian_corpus\.py --mirror"):
        debian.read_examples("debian_ende", "test")
    with pytest.raises(ValueError, match="no split 'dev'; it has train, validation, test"):
        debian.read_examples("debian_ende", "dev")
