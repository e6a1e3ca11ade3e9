"""Checkpoints of decoder-only models: ours and GPT-2's; their damage, their vocabulary."""

import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from speculative import checkpoints
from speculative.checkpoints import Checkpoint, native
from speculative.checkpoints.checkpoint import DTYPES, read_settings
from speculative.models import DecoderOnlyConfig
from speculative.models.gpt import LAMDA
from speculative.vocabulary import (
    END_OF_TEXT,
    SentencePiece,
    Tokenizer,
    from_elsewhere,
    open_vocabulary,
)
from tests import saved
from tests.checkpoints.test_formats import edit_json, edit_tensors, equal

GPT2 = pathlib.Path(__file__).parents[1] / "data" / "transformers_gpt2"
CONFIGS = {
    "GPT": DecoderOnlyConfig(40, 16, 2, 8, 24, 2, max_positions=30),
    "LaMDA": DecoderOnlyConfig(40, 16, 2, 12, 24, 1, **LAMDA),
}
SENTENCES = ["Exact decoding is exact.", "A naïve 🙂 draft,\n  guesses\tahead", "", "  "]


@pytest.fixture
def theirs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the golden model."""
    return shutil.copytree(GPT2, tmp_path / "theirs")


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ours_and_back(tmp_path: pathlib.Path, name: str, storage: native.Storage) -> None:
    config = CONFIGS[name]
    native.save(tmp_path / "made", config, saved.drawn(config, 1), storage=storage)
    made = checkpoints.open(tmp_path / "made")
    assert made.config == config
    given = native.in_memory("given", config, saved.drawn(config, 1))
    for part in given.tensors:
        want = given.read(part)
        if storage != "int8":
            want = want.astype(DTYPES[storage])
        elif part + native.SCALE in (stored := native.quantize(part, want)):
            want = stored[part] * stored[part + native.SCALE]
        np.testing.assert_array_equal(made.read(part), want, err_msg=part)


def test_gpt2_keeps_every_bit(tmp_path: pathlib.Path) -> None:
    original = checkpoints.open(GPT2)
    assert original.config == DecoderOnlyConfig(96, 24, 3, 8, 96, 2, max_positions=64)
    checkpoints.convert(GPT2, tmp_path / "ours", "native")
    again = checkpoints.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    equal(again, original)
    assert again.config == original.config
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "theirs", GPT2))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    said, settings = read_settings(GPT2), read_settings(tmp_path / "theirs")
    assert settings.pop("torch_dtype") == "float32"
    different = {name for name, value in settings.items() if value != said[name]}
    # 96, for what null stands for; and training's dropout, which is not read.
    assert different == {"n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop"}
    half = checkpoints.convert(GPT2, tmp_path / "half", "huggingface", "bfloat16")
    for name in half.tensors:
        want = original.read(name).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(half.read(name), want)


def test_a_gpt_with_logits_of_its_own(tmp_path: pathlib.Path) -> None:
    config = CONFIGS["GPT"].replace(logits_via_embedding=False)
    native.save(tmp_path / "ours", config, saved.drawn(config, 1))
    made = checkpoints.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    assert made.config == config
    equal(made, checkpoints.open(tmp_path / "ours"))
    edit_tensors(tmp_path / "theirs", lm_head__weight=None)
    with pytest.raises(ValueError, match=r"lacks the tensor lm_head\.weight"):
        checkpoints.open(tmp_path / "theirs")


def test_names_without_prefix_masks_and_copies(theirs: pathlib.Path) -> None:
    """As the first uploads have them, and as others add."""
    stored = load_file(theirs / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in stored.items()}
    mask = np.zeros((1, 1, 64, 64), np.float32)
    masks = {"h.0.attn.bias": mask, "h.1.attn.masked_bias": np.zeros((), np.float32)}
    save_file(bare | masks, theirs / "model.safetensors")
    equal(checkpoints.open(theirs), checkpoints.open(GPT2))
    masks = {f"transformer.{name}": value for name, value in masks.items()}
    copy = {"lm_head.weight": stored["transformer.wte.weight"] * 1}
    save_file(stored | masks | copy, theirs / "model.safetensors")
    equal(checkpoints.open(theirs), checkpoints.open(GPT2))


ATTENTION = "transformer__h__1__attn__c_attn__weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({ATTENTION: None}, r"lacks the tensor transformer\.h\.1\.attn\.c_attn\.weight"),
        (
            {ATTENTION: np.zeros((24, 73), np.float32)},
            r"c_attn\.weight of .* is \(24, 73\), which does not split into 3",
        ),
        (
            {ATTENTION: np.zeros((24, 75), np.float32)},
            r"layers_1/self_attention/key/kernel .* \(24, 25\); .* \(24, 24\)",
        ),
        ({"transformer__wpe__weight": np.zeros((60, 24), np.float32)}, r"\(60, 24\); .* \(64, 24"),
        ({"transformer__h__2__ln_1__bias": np.zeros(24, np.float32)}, r"h\.2\.ln_1\.bias, unknown"),
        ({ATTENTION: np.full((24, 72), np.nan, np.float32)}, "query/kernel .* not finite"),
    ],
)
def test_damaged_tensors_are_named(theirs: pathlib.Path, tensors: Any, message: str) -> None:
    edit_tensors(theirs, **tensors)
    with pytest.raises(ValueError, match=message):
        checkpoints.convert(theirs, theirs.with_name("ours"), "native")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation_function", "relu", "'relu'; supported is gelu_new or gelu_pytorch_tanh"),
        ("layer_norm_epsilon", 1e-6, "1e-06; supported is 1e-05"),
        ("scale_attn_by_inverse_layer_idx", True, "True; supported is False"),
        ("scale_attn_weights", False, "False; supported is True"),
        ("add_cross_attention", True, "True; supported is False"),
        ("n_head", 5, "n_embd of 24 for an n_head of 5"),
        ("n_head", 0, "n_head 0; it must be a positive whole number"),
        ("n_layer", "2", "n_layer '2'; it must be"),
        ("n_embd", None, "n_embd None; it must be"),
        ("model_type", "gptj", "of a 'gptj' model; only T5"),
    ],
)
def test_unsupported_settings_are_one_sentence(
    theirs: pathlib.Path, name: str, value: Any, message: str
) -> None:
    edit_json(theirs / "config.json", **{name: value})
    with pytest.raises(ValueError, match=f"config.json .*{message}"):
        checkpoints.open(theirs)


def test_what_the_formats_of_others_cannot_hold(tmp_path: pathlib.Path) -> None:
    def checkpoint(name: str, **changes: Any) -> Checkpoint:
        config = CONFIGS[name].replace(**changes)
        return native.in_memory("here", config, saved.drawn(config, 1))

    for made, to, message in (
        (checkpoint("GPT"), "t5x", "only T5s, not GPT .*; write here in"),
        (checkpoint("LaMDA"), "huggingface", "no decoder-only model with a T5's layers, as here"),
        (checkpoint("GPT", head_dim=4), "huggingface", "share its 16 features, but here has 2 of"),
        (checkpoint("GPT", mlp_activations=("relu",)), "huggingface", "has mlp_.*relu.* where"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoints.FORMATS[to].write(tmp_path / "copy", made)
    assert not list(tmp_path.iterdir())


def test_descriptions(tmp_path: pathlib.Path) -> None:
    said = checkpoints.describe(checkpoints.open(GPT2))
    assert said["family"] == "GPT (tied logits)"
    assert said["layers"] == "2 decoder layers, 64 positions"
    native.save(tmp_path / "lamda", CONFIGS["LaMDA"], saved.drawn(CONFIGS["LaMDA"], 1))
    said = checkpoints.describe(checkpoints.open(tmp_path / "lamda"))
    assert said["family"] == "LaMDA-like (gated GELU, tied logits)"
    assert said["layers"] == "1 decoder layer, relative positions"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small vocabulary of GPT-2's kind: in one file, and in the older two."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_byte_pairs(files: pathlib.Path, name: str) -> None:
    vocabulary = open_vocabulary(files / name)
    assert isinstance(vocabulary, Tokenizer)
    assert vocabulary.size == len(vocabulary.pieces) == 290
    assert vocabulary.pieces[vocabulary.eos_ids[0]] == END_OF_TEXT
    for text in SENTENCES:
        tokens = vocabulary.encode(text)
        assert tokens.dtype == np.int32
        assert tokens[-1] in vocabulary.eos_ids
        assert vocabulary.decode(tokens) == vocabulary.decode([*tokens, 40, 41]) == text
        prompt = vocabulary.prompt(text)
        assert prompt.dtype == np.int32
        np.testing.assert_array_equal(prompt, tokens[:-1] if text else tokens)
        assert len(text) < 8 or len(text) > len(prompt) > 4
    assert vocabulary.decode([-1, *vocabulary.encode("a")[:-1], 290, 4000]) == "a"
    assert from_elsewhere(files / name, 5000).size == 290
    other = open_vocabulary(files / "tokenizer.json")
    vocabulary.require_equal(other)
    assert vocabulary.fingerprint == other.fingerprint
    np.testing.assert_array_equal(vocabulary.encode(SENTENCES[1]), other.encode(SENTENCES[1]))


def test_pieces_of_t5_as_prompts() -> None:
    vocabulary = open_vocabulary(checkpoints.ASSETS / "debian.model", 3)
    assert type(vocabulary) is SentencePiece
    assert (vocabulary.extra_ids, vocabulary.eos_ids) == (3, (1,))
    tokens = vocabulary.encode("speculative decoding")
    np.testing.assert_array_equal(vocabulary.prompt("speculative decoding"), [0, *tokens[:-1]])
    np.testing.assert_array_equal(vocabulary.prompt(""), [0])


def test_vocabularies_that_cannot_be_read(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copy(files / "vocab.json", tmp_path)
    with pytest.raises(ValueError, match=r"vocab\.json: merges\.txt is missing"):
        open_vocabulary(tmp_path / "vocab.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no vocabulary of byte pairs"):
        open_vocabulary(tmp_path / "tokenizer.json")
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    other.save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match=r"words\.json .* no piece <\|endoftext\|>"):
        open_vocabulary(tmp_path / "words.json")


@pytest.mark.parametrize("kept", [["tokenizer.json"], ["vocab.json", "merges.txt"]])
def test_the_vocabulary_travels(
    files: pathlib.Path, theirs: pathlib.Path, tmp_path: pathlib.Path, kept: list[str]
) -> None:
    assert checkpoints.open(theirs).vocabulary is None
    for name in kept:
        shutil.copy(files / name, theirs)
    ours = checkpoints.convert(theirs, tmp_path / "ours", "native")
    again = checkpoints.convert(tmp_path / "ours", tmp_path / "again", "huggingface")
    for checkpoint in (ours, again):
        assert checkpoint.vocabulary is not None
        assert checkpoint.vocabulary.name == "tokenizer.json"
        assert checkpoint.extra_ids == 0
        open_vocabulary(checkpoint.vocabulary).require_equal(Tokenizer(files / "tokenizer.json"))
    assert checkpoints.describe(ours)["vocabulary"] == "tokenizer.json, 290 pieces"


def test_a_gpt_may_have_pieces(tmp_path: pathlib.Path) -> None:
    pieces, config = checkpoints.ASSETS / "debian.model", CONFIGS["GPT"].replace(vocab_size=8192)
    native.save(tmp_path / "made", config, saved.drawn(config, 1))
    made = checkpoints.convert(tmp_path / "made", tmp_path / "a", "huggingface", vocabulary=pieces)
    assert made.vocabulary == tmp_path / "a" / "spiece.model"
    assert made.extra_ids == 0
