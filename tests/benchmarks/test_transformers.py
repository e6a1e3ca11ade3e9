"""Against the installed transformers, live: `make test-peers` runs these."""

import json
import pathlib
import runpy

import jax
import numpy as np
import pytest
import tokenizers

from speculative import checkpoints
from speculative.models import model_of
from speculative.types import PADDING
from speculative.vocabulary import open_vocabulary
from tests import saved

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
golden = runpy.run_path(str(ROOT / "scripts" / "make_transformers_golden.py"))
VERSIONS = sorted(golden["VERSIONS"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_files_are_what_it_computes_today(version: str) -> None:
    model = golden["make"](version)
    with np.load(ROOT / "tests" / "data" / version / "expected.npz") as stored:
        for name, value in golden["expected"](model).items():
            np.testing.assert_allclose(value, stored[name], atol=1e-4)


@pytest.mark.parametrize("shards", ["one file", "shards", "torch"])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_it_saves_is_what_we_compute(
    tmp_path: pathlib.Path, version: str, shards: str
) -> None:
    model = golden["make"](version)
    if shards == "torch":
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        model.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "shards" else "1GB")
    checkpoint = checkpoints.open(tmp_path)
    expected = golden["expected"](model)
    inputs = jax.device_put(np.where(expected["inputs"] == 0, PADDING, expected["inputs"]))
    arguments = inputs, jax.device_put(expected["decoder_inputs"])
    logits = saved.forward(model_of(checkpoint.config), checkpoint.load("float32"), *arguments)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_loads_what_we_write(
    tmp_path: pathlib.Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing missing, nothing unexpected, and the same logits; in one file and in shards."""
    theirs = golden["make"](version)
    theirs.save_pretrained(tmp_path / "theirs")
    # As it loads its own: transformers 5 scales the logits of an umT5 as if they were tied.
    expected = golden["expected"](type(theirs).from_pretrained(tmp_path / "theirs").eval())
    for size in (2**30, 20_000):
        monkeypatch.setattr(checkpoints.FORMATS["huggingface"], "SHARD_BYTES", size)
        checkpoints.convert(tmp_path / "theirs", tmp_path / str(size), "huggingface")
        model, said = type(theirs).from_pretrained(tmp_path / str(size), output_loading_info=True)
        assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        found = golden["expected"](model.eval())
        np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
        np.testing.assert_array_equal(found["greedy"], expected["greedy"])


def test_the_golden_gpt2_is_what_it_computes_today() -> None:
    with np.load(ROOT / "tests" / "data" / golden["GPT2"] / "expected.npz") as stored:
        for name, value in golden["expected_gpt2"](golden["make_gpt2"]()).items():
            np.testing.assert_allclose(value, stored[name], atol=1e-4)


@pytest.mark.parametrize("part", ["whole", "transformer", "torch"])
def test_we_compute_what_it_saves_of_gpt2(tmp_path: pathlib.Path, part: str) -> None:
    """With logits, without them (and so without prefix), and in torch's own format."""
    model = golden["make_gpt2"]()
    if part == "torch":
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        (model if part == "whole" else model.transformer).save_pretrained(tmp_path)
    checkpoint, expected = checkpoints.open(tmp_path), golden["expected_gpt2"](model)
    texts = jax.device_put(expected["texts"])
    logits = saved.forward(model_of(checkpoint.config), checkpoint.load("float32"), texts, texts)
    np.testing.assert_allclose(logits[:, :: golden["EVERY"]], expected["logits"], atol=1e-4)


def test_it_loads_the_gpt2_that_we_write(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From our own format, in shards, with a vocabulary."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    pieces = {piece: i for i, piece in enumerate([*sorted(alphabet), "ab", "<|endoftext|>"])}
    monkeypatch.setitem(golden["GPT2_SIZES"], "vocab_size", len(pieces))
    golden["make_gpt2"]().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.json").write_text(json.dumps(pieces))
    (tmp_path / "theirs" / "merges.txt").write_text("#version: 0.2\na b\n")
    monkeypatch.setattr(checkpoints.FORMATS["huggingface"], "SHARD_BYTES", 20_000)
    checkpoints.convert(tmp_path / "theirs", tmp_path / "ours", "native")
    made = checkpoints.convert(tmp_path / "ours", tmp_path / "again", "huggingface")
    model, said = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "again", output_loading_info=True
    )
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = golden["expected_gpt2"](golden["make_gpt2"]())
    found = golden["expected_gpt2"](model.eval())
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
    np.testing.assert_array_equal(found["greedy"], expected["greedy"])
    assert made.vocabulary is not None
    ours, text = open_vocabulary(made.vocabulary), "abba, naïve 🙂\n"
    for folder in ("theirs", "again"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert theirs(text)["input_ids"] == ours.encode(text)[:-1].tolist()
        assert (theirs.eos_token_id,) == ours.eos_ids
