"""Every format into every other: T5X's own file, golden files of transformers, and damage."""

import contextlib
import errno
import gzip
import itertools
import json
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization, traverse_util
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from speculative import checkpoints
from speculative.checkpoints import Checkpoint, huggingface, t5x
from speculative.checkpoints.checkpoint import Tensor, by_name
from speculative.models import SIZES, T5Config, abstract_params, model_of
from speculative.models.reads import Reads
from speculative.models.t5 import T5Names
from speculative.types import PADDING
from speculative.vocabulary import BYTES, Bytes, from_elsewhere, open_vocabulary
from tests import saved

DATA = pathlib.Path(__file__).parents[1] / "data"
T5X = DATA / "t5x_v1_1" / "checkpoint_1000"
V1_0 = T5Config(40, 16, 2, 4, 24, 2, 1, mlp_activations=("relu",), logits_via_embedding=True)
V1_1 = T5Config(40, 16, 4, 8, 24, 1, 3, num_buckets=16)
UMT5 = V1_1.replace(num_encoder_layers=2, shared_positions=False)
UL2 = V1_1.replace(mlp_activations=("silu", "linear"))
Damage = Callable[[pathlib.Path], object]


def index_of(folder: pathlib.Path) -> dict[str, Any]:
    """T5X's index of a checkpoint."""
    return serialization.msgpack_restore((folder / "checkpoint").read_bytes())  # pyright: ignore


def equal(one: Checkpoint, other: Checkpoint) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), other.read(name), err_msg=name)


def save(folder: pathlib.Path, config: T5Config, to: str = "native") -> Checkpoint:
    """A random checkpoint of a format."""
    made = folder.with_name("source")
    checkpoints.native.save(made, config, saved.drawn(config, 1))
    return checkpoints.convert(made, folder, to)


def test_what_t5x_wrote_keeps_every_bit_through_all_formats(tmp_path: pathlib.Path) -> None:
    made = original = checkpoints.open(T5X)
    description = json.loads((T5X.parent / "config.json").read_text())["config"]
    assert original.config == T5Config(**description)
    source: str | pathlib.Path = T5X
    for i, to in enumerate(("native", "huggingface", "t5x", "native", "t5x", "huggingface")):
        made = checkpoints.convert(source, tmp_path / str(i), to)
        assert (made.format, made.config) == (to, original.config)
        equal(made, original)
        source = tmp_path / str(i)
    with np.load(T5X.parent / "expected.npz") as expected:
        model = model_of(made.config)
        inputs, outputs = expected["encoder_input_tokens"], expected["decoder_input_tokens"]
        inputs = np.where(inputs == 0, PADDING, inputs)
        logits = saved.forward(model, made.load("float32"), inputs, outputs)
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("to", "config"),
    [
        *itertools.product(checkpoints.FORMATS, (V1_0, V1_1, UMT5)),
        *itertools.product(("native", "huggingface"), [UL2]),  # T5X's shapes show no function.
    ],
)
def test_versions_and_number_formats(tmp_path: pathlib.Path, config: T5Config, to: str) -> None:
    made = save(tmp_path / "made", config, to)
    assert made.config == config
    equal(made, checkpoints.open(tmp_path / "source"))
    half = checkpoints.convert(tmp_path / "made", tmp_path / "half", to, "bfloat16")
    assert half.dtype == "bfloat16"
    assert half.config == config
    for name in half.tensors:
        want = made.read(name).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(half.read(name).astype(np.float32), want.astype(np.float32))
    again = checkpoints.convert(tmp_path / "half", tmp_path / "again", "native")
    assert again.dtype == "bfloat16"
    loaded = half.load("bfloat16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(loaded))


def test_our_index_is_that_of_t5x(tmp_path: pathlib.Path) -> None:
    """Keys, shapes, chunks, number formats and version: T5X's own file for the same model."""
    checkpoints.convert(T5X, tmp_path / "checkpoint_0", "t5x")
    ours, theirs = (index_of(folder) for folder in (tmp_path / "checkpoint_0", T5X))
    assert ours["version"] == theirs["version"] == 3
    assert ours["optimizer"]["target"] == theirs["optimizer"]["target"]
    step = ours["optimizer"]["state"]["step"]
    assert step.dtype == theirs["optimizer"]["state"]["step"].dtype
    for name in traverse_util.flatten_dict(ours["optimizer"]["target"], sep="."):
        if name.endswith(".metadata.shape"):
            array = f"target.{name.removesuffix('.metadata.shape')}/.zarray"
            mine, yours = (
                json.loads((folder / array).read_text())
                for folder in (tmp_path / "checkpoint_0", T5X)
            )
            assert mine == yours


@pytest.mark.parametrize("flaxformer", [False, True], ids=["scalable_t5", "Flaxformer"])
@pytest.mark.parametrize("config", [V1_1.replace(num_encoder_layers=2), UMT5], ids=["T5", "umT5"])
def test_scanned_layers_are_unstacked(
    tmp_path: pathlib.Path, config: T5Config, flaxformer: bool
) -> None:
    """scalable_t5 stacks its layers along axis 1, under `layers`; Flaxformer under other names."""
    folder = tmp_path / "checkpoint_0"
    source = save(folder, config, "t5x")
    index = index_of(folder)
    tree: dict[str, Any] = {"token_embedder": index["optimizer"]["target"]["token_embedder"]}
    for stack, depth in (("encoder", 2), ("decoder", 3)):
        unscanned = index["optimizer"]["target"][stack]
        tree[stack] = {key: value for key, value in unscanned.items() if "layers_" not in key}
        stacked: dict[tuple[str, ...], np.ndarray] = {}
        for name in source.tensors:
            first, layer, *rest = name.split("/")
            if first == stack and layer == "layers_0":
                stacked[tuple(rest)] = np.stack(
                    [source.read("/".join((stack, f"layers_{i}", *rest))) for i in range(depth)],
                    axis=1,
                )
        if flaxformer:  # As umT5's are published, where heads have an axis of their own too.
            for (*rest, part), value in [*stacked.items()]:
                whole, deep, width = value.shape[0], value.shape[1], value.shape[-1]
                if rest[-1] in ("query", "key", "value"):
                    stacked[*rest, part] = value.reshape(whole, deep, config.num_heads, -1)
                elif rest[-1] == "out":
                    apart = value.reshape(config.num_heads, -1, deep, width)
                    stacked[*rest, part] = apart.swapaxes(1, 2)
                elif rest[-1] == "relative_posemb":
                    stacked["relpos_bias", part] = stacked.pop((*rest, part))
        name = stack if flaxformer else "layers"
        tree[stack][name] = traverse_util.unflatten_dict(stacked)
    index["optimizer"]["target"] = tree
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(index))
    scanned = checkpoints.open(folder)
    assert scanned.config == config
    equal(scanned, source)


@pytest.mark.parametrize("size", ["t5_small", "mt5_small", "umt5_small", "byt5_small", "ul2"])
def test_shapes_show_the_sizes_that_have_names(size: str) -> None:
    shapes = {name: x.shape for name, x in by_name(abstract_params(SIZES[size])).items()}
    assert T5Names().infer(shapes, "here") == SIZES[size]


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"mlp_activations": ("silu", "linear")}, r"read as \('gelu', 'linear'\); .*--to native"),
        ({"max_distance": 64}, "has max_distance = 64, .* read as 128"),
    ],
)
def test_what_t5x_has_no_place_for_is_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ValueError, match=fragment):
        save(tmp_path / "made", V1_1.replace(**changes), "t5x")
    assert not (tmp_path / "made").exists()
    ul2 = SIZES["ul2"].replace(dropout_rate=0.1, dtype="bfloat16")
    assert isinstance(ul2, T5Config)
    T5Names().require_t5x(ul2, "here")


@pytest.mark.parametrize(
    "family", ["gemma", "llama4", "qwen3_moe", "bart", "longt5", "switch_transformers"]
)
def test_other_families_get_a_sentence(tmp_path: pathlib.Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    known = "only T5, Flan-T5, UL2, ByT5, mT5 and umT5 .* and GPT-2 .* are read"
    with pytest.raises(ValueError, match=f"of a '{family}' model; {known}"):
        checkpoints.open(tmp_path)


def test_a_folder_on_google_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    assert t5x.kvstore("gs://t5-data/pretrained/checkpoint_1/") == {
        "driver": "gcs",
        "bucket": "t5-data",
        "path": "pretrained/checkpoint_1/",
    }
    assert checkpoints.known("gs://t5-data/x")
    opened = []
    monkeypatch.setattr(t5x, "open", opened.append)
    checkpoints.open("gs://t5-data/x")
    assert opened == ["gs://t5-data/x"]


GOLDEN = {
    "transformers_v1_0": "T5 v1.0 (ReLU, tied logits)",
    "transformers_v1_1": "T5 v1.1 (gated GELU, untied logits)",  # LM-adapted and Flan-T5 too.
    "transformers_mt5": "T5 v1.1 (gated GELU, untied logits)",
    "transformers_byt5": "T5 v1.1 (gated GELU, untied logits)",
    "transformers_umt5": "umT5 (gated GELU, relative positions in every layer, untied logits)",
    "transformers_ul2": "UL2 (gated SiLU, untied logits)",
}


def golden(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A copy of a golden checkpoint; of some the weights are those of v1.1, and stored once."""
    weights = DATA / "transformers_v1_1" / "model.safetensors"
    made = pathlib.Path(shutil.copytree(DATA / name, folder / name))
    if not (made / weights.name).exists():
        shutil.copy(weights, made)
    return made


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    """Weights, inputs and outputs by scripts/make_transformers_golden.py."""
    checkpoint = checkpoints.open(golden(name, tmp_path))
    params, model = checkpoint.load("float32"), model_of(checkpoint.config)
    assert checkpoint.config.description()[0] == GOLDEN[name]
    with np.load(DATA / name / "expected.npz") as expected:
        inputs = np.where(expected["inputs"] == 0, PADDING, expected["inputs"])
        # One width for all lengths: no position sees those after it.
        count, given = expected["greedy"].shape[1], expected["decoder_inputs"]
        tokens = np.zeros((len(inputs), count + 1), np.int32)
        tokens[:, : given.shape[1]] = given
        logits = saved.forward(model, params, inputs, tokens)[:, : given.shape[1]]
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
        tokens[:] = 0
        for i in range(count):
            logits = saved.forward(model, params, inputs, tokens)
            tokens[:, i + 1] = np.argmax(logits[:, i], axis=-1)
        np.testing.assert_array_equal(tokens[:, 1:], expected["greedy"])


with gzip.open(DATA / "transformers_t5_shapes.json.gz") as _file:
    PUBLIC: dict[str, Any] = json.load(_file)


@pytest.mark.parametrize("name", PUBLIC)
def test_names_and_shapes_of_public_checkpoints(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of transformers' models with Google's settings, by the same script; no weights."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]["config"]))
    stored = {
        key: Tensor(tuple(shape), "float32", lambda: np.zeros(0))
        for key, shape in PUBLIC[name]["tensors"].items()
    }
    monkeypatch.setattr(huggingface, "_stored", lambda folder: stored)
    checkpoint = checkpoints.open(tmp_path)
    size = name.removeprefix("google/").removeprefix("flan-").removesuffix("-lm-adapt")
    if name in ("google/flan-t5-small", "google/t5-small-lm-adapt"):
        size = "t5_1_1_small"
    size = size.replace("v1_1", "1_1").replace("-", "_")
    assert checkpoint.config == SIZES[size]
    assert f"the sizes of {size}" in checkpoints.describe(checkpoint)["family"]
    sentinels = {"google/mt5-small": 0, "google/umt5-small": 300}
    assert checkpoint.extra_ids == sentinels.get(name, 100)


def test_tied_logits_of_mt5_and_umt5(tmp_path: pathlib.Path) -> None:
    """Recent versions say "tied" of both, of mT5 without scaling and keeping its logits."""
    for name in ("transformers_mt5", "transformers_umt5"):
        edit_json(golden(name, tmp_path) / "config.json", tie_word_embeddings=True)
    made = checkpoints.open(tmp_path / "transformers_mt5")
    equal(made, checkpoints.open(DATA / "transformers_v1_1"))
    umt5 = tmp_path / "transformers_umt5"
    with pytest.raises(ValueError, match=r"tied .* and so scaled, but there is an lm_head\.weight"):
        checkpoints.open(umt5)
    edit_tensors(umt5, lm_head__weight=None)
    assert checkpoints.open(umt5).config.logits_via_embedding


def test_bytes_are_the_vocabulary_of_byt5(tmp_path: pathlib.Path) -> None:
    """As transformers' tokenizer has them; they travel, and have no file."""
    made = checkpoints.open(DATA / "transformers_byt5")
    vocabulary = made.open_vocabulary()
    assert isinstance(vocabulary, Bytes)
    assert (vocabulary.size, len(vocabulary.pieces), vocabulary.extra_ids) == (384, 384, 125)
    assert vocabulary.pieces[3 + ord("a")] == "<0x61>"
    tokenizer = json.loads((DATA / "transformers_byt5" / "tokenizer_config.json").read_text())
    for i, token in tokenizer["added_tokens_decoder"].items():
        assert vocabulary.pieces[int(i)] == token["content"]
    with np.load(DATA / "transformers_byt5" / "expected.npz") as expected:
        text = str(expected["text"])
        np.testing.assert_array_equal(vocabulary.encode(text), expected["tokens"])
        assert vocabulary.decode(expected["tokens"]) == text
    assert vocabulary.decode([0, 2, 100, 300, 3 + 0xE2, 100, 1, 101]) == "aa"
    for i, to in enumerate(("native", "huggingface", "native")):
        source, folder = made.location, tmp_path / str(i)
        made = checkpoints.convert(source, folder, to)
        assert not (folder / BYTES).exists()
        assert (str(made.vocabulary), made.extra_ids) == (BYTES, 125)
        assert checkpoints.describe(made)["vocabulary"] == "bytes, 259 pieces and 125 sentinels"
    found = from_elsewhere(BYTES, 384)  # As with T5X's checkpoints.
    found.require_equal(vocabulary)
    assert (from_elsewhere(BYTES, 260).size, open_vocabulary(BYTES, 3).size) == (259, 262)


def test_shards_with_an_index(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4000)
    made = save(tmp_path / "made", V1_1, "huggingface")
    shards = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(shards) > 3
    assert (tmp_path / "made" / "model.safetensors.index.json").is_file()
    equal(made, checkpoints.open(tmp_path / "source"))
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"{shards[1].name} is missing; .*index.json names it"):
        checkpoints.open(tmp_path / "made")


def test_the_index_says_where_a_tensor_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second copy, wherever it lies, is named and not read."""
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4000)
    made = save(tmp_path / "made", V1_1, "huggingface")
    first, *_, last = shards = sorted((tmp_path / "made").glob("*.safetensors"))
    for shard, other in ((first, last), (last, first)):
        kept, stale = load_file(shard), sorted(load_file(other))[0]
        save_file(kept | {stale: np.zeros(9, np.float32)}, shard)
        equal(checkpoints.open(tmp_path / "made"), made)
        assert f"{shard} holds a copy of {stale};" in caplog.text
        save_file(kept, shard)
    for shard in (first, last):
        save_file(load_file(shard) | {"unlisted": np.zeros(9, np.float32)}, shard)
    with pytest.raises(ValueError, match=f"{last} and another .* hold the tensor unlisted"):
        checkpoints.open(tmp_path / "made")
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(ValueError, match=f"{shards[1]} lacks the tensor .* assigns to it"):
        checkpoints.open(tmp_path / "made")


def test_float64_is_read_as_float32(tmp_path: pathlib.Path) -> None:
    made = save(tmp_path / "made", V1_1, "huggingface")
    path = tmp_path / "made" / "model.safetensors"
    stored = {name: value.astype(np.float64) for name, value in load_file(path).items()}
    save_file(stored, path)
    equal(checkpoints.open(tmp_path / "made"), made)
    stored["shared.weight"][3, 5] = 1e300
    save_file(stored, path)
    with pytest.raises(ValueError, match="token_embedder/embedding of .* not finite"):
        checkpoints.open(tmp_path / "made").load("float32")


def test_copies_that_exports_hold_are_passed_over(tmp_path: pathlib.Path) -> None:
    made = save(tmp_path / "made", V1_0, "huggingface")
    path = tmp_path / "made" / "model.safetensors"
    stored = load_file(path)
    stored["lm_head.weight"] = stored["encoder.embed_tokens.weight"] = stored["shared.weight"] * 1
    old = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(stored | {old: np.zeros((32, 2), np.float32)}, path)
    equal(checkpoints.open(tmp_path / "made"), made)


def test_logits_that_are_tied_but_not_scaled(tmp_path: pathlib.Path) -> None:
    """As recent versions of transformers make and describe them."""
    made = save(tmp_path / "made", V1_1, "huggingface")
    edit_tensors(tmp_path / "made", lm_head__weight=None)
    edit_json(
        tmp_path / "made" / "config.json", tie_word_embeddings=True, scale_decoder_outputs=False
    )
    tied = checkpoints.open(tmp_path / "made")
    assert not tied.config.logits_via_embedding
    embedding = made.read("token_embedder/embedding")
    np.testing.assert_array_equal(tied.read("decoder/logits_dense/kernel"), embedding.T)


def test_the_vocabulary_travels(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "made", V1_1.replace(vocab_size=8292))
    pieces = checkpoints.ASSETS / "debian.model"
    made = checkpoints.convert(tmp_path / "made", tmp_path / "hf", "huggingface", vocabulary=pieces)
    again = checkpoints.convert(tmp_path / "hf", tmp_path / "again", "native")
    for checkpoint in (made, again):
        assert checkpoint.vocabulary is not None
        assert checkpoint.vocabulary.read_bytes() == pieces.read_bytes()
        assert checkpoint.extra_ids == 100


def test_what_convert_refuses_before_it_reads(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And writes nothing of."""
    source = tmp_path / "made"
    checkpoints.native.save(source, V1_1, saved.drawn(V1_1, 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Checkpoint, "read", None)
    pieces = checkpoints.ASSETS / "debian.model"
    cases: tuple[tuple[str, str, dict[str, Any], str], ...] = (
        ("copy", "onnx", {}, "Unknown format 'onnx' to write; known: native, t5x, huggingface"),
        ("copy", "t5x", {"dtype": "int8"}, "Unknown dtype 'int8' .* float32, bfloat16"),
        ("gs://bucket/copy", "t5x", {}, "gs://bucket/copy is remote, .* local folders"),
        ("copy", "t5x", {"vocabulary": pieces}, "holds no vocabulary, so .*debian.model would be"),
        ("copy", "native", {"vocabulary": pieces}, "has 40 embeddings, fewer than the 8192 pieces"),
    )
    for destination, to, given, message in cases:
        with pytest.raises(ValueError, match=message):
            checkpoints.convert(source, destination, to, **given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_a_draft_that_guesses_some_tokens_alone(tmp_path: pathlib.Path) -> None:
    """Its logits are some of the whole draft's, in int8 too; and what it knows it keeps."""
    whole = V1_1.replace(num_encoder_layers=0, reads=Reads(24))
    params = saved.drawn(whole, 1)
    checkpoints.native.save(tmp_path / "whole", whole, params, storage="int8")
    kept = [39, 1, 3, 17]
    made = checkpoints.convert(tmp_path / "whole", tmp_path / "part", "native", "int8", tokens=kept)
    fewer = checkpoints.convert(tmp_path / "part", tmp_path / "few", "native", tokens=[3, 39])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, whole.vocab_size, (2, 5)).astype(np.int32)
    encoded = rng.normal(size=(2, 7, 24)).astype(np.float32)

    def logits(checkpoint: Checkpoint) -> np.ndarray:
        model = model_of(checkpoint.config)
        inputs, params = np.ones((2, 7), np.int32), checkpoint.load("float32")
        return np.asarray(saved.forward(model, params, inputs, tokens, encoded=encoded))

    all_of_them = logits(checkpoints.open(tmp_path / "whole"))
    np.testing.assert_allclose(logits(made), all_of_them[..., sorted(kept)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits(fewer), all_of_them[..., [3, 39]], rtol=1e-5, atol=1e-6)
    for given, said in (
        ([], "must guess some tokens"),
        ([1, 2], "part does not guess token 2"),
        ([40], "draft_vocabulary must be of tokens below 40"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoints.convert(tmp_path / "part", tmp_path / "no", "native", tokens=given)
    for to in ("t5x", "huggingface"):
        with pytest.raises(ValueError, match=f"the format {to} knows no such model"):
            checkpoints.convert(tmp_path / "part", tmp_path / "no", to)


@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_two_conversions_to_one_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """The first that ends has it, whole; the user's own folder of a like name stays."""
    source = save(tmp_path / "made", V1_1)
    mine = tmp_path / "copy.unfinished" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    read = Checkpoint.read

    def meanwhile(self: Checkpoint, name: str) -> np.ndarray:
        if not (tmp_path / "copy").exists():
            monkeypatch.setattr(Checkpoint, "read", read)
            checkpoints.convert(source.location, tmp_path / "copy", to)
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", meanwhile)
    with pytest.raises(ValueError, match="copy exists already"):
        checkpoints.convert(source.location, tmp_path / "copy", to)
    equal(checkpoints.open(tmp_path / "copy"), source)
    assert mine.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {
        "made",
        "source",
        "copy",
        mine.parent.name,
    }


def test_what_a_kill_leaves_is_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes, and no later conversion touches it."""
    source = save(tmp_path / "made", V1_0)
    for number, to in enumerate(checkpoints.FORMATS):
        here = tmp_path / str(number)
        made = checkpoints.convert(source.location, here / "whole", to)
        last = {"t5x": "checkpoint"}.get(to, "config.json")
        left = here / ".unfinished-x" / "copy"
        shutil.copytree(made.location, left, ignore=lambda *_: [last])  # noqa: B023
        for folder in (left, left.parent):
            with pytest.raises(ValueError, match="is no checkpoint"):
                checkpoints.open(folder)
        checkpoints.convert(source.location, here / "copy", to)
        assert left.is_dir()
        written = sorted((here / "copy").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert written[-1].name == last


def test_a_path_through_another_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = save(tmp_path / "checkpoint_1", V1_1, "t5x")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    equal(checkpoints.open("../checkpoint_1"), made)
    checkpoints.convert("../here/../checkpoint_1", "../copy", "t5x")
    equal(checkpoints.open(tmp_path / "copy"), made)


def test_a_bucket_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t5x, "WAIT", 0.2)
    with socket.create_server(("localhost", 0)) as silent:
        address = f"http://localhost:{silent.getsockname()[1]}"
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        with pytest.raises(TimeoutError, match=r"gs://bucket/x .* no answer within 0\.2 sec"):
            checkpoints.open("gs://bucket/x")


@contextlib.contextmanager
def edited_index(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The parameters in T5X's index, for changes."""
    index = index_of(folder)
    yield index["optimizer"]["target"]
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(index))


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Changes the leaf of the embedding in T5X's index."""

    def damage(folder: pathlib.Path) -> None:
        with edited_index(folder) as tree:
            change(tree["token_embedder"]["embedding"])

    return damage


def edit_json(path: pathlib.Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: pathlib.Path, **changes: Any) -> None:
    """Tensors by name, "__" for ".": a new one, or None to drop it."""
    stored = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        stored.pop(name.replace("__", "."), None)
        if value is not None:
            stored[name.replace("__", ".")] = value
    save_file(stored, folder / "model.safetensors")


def scanned(folder: pathlib.Path) -> None:
    """An index that claims a hundred million layers."""
    with edited_index(folder) as tree:
        leaf = tree["token_embedder"]["embedding"] | {"metadata": {"shape": [16, 10**8]}}
        tree["decoder"]["layers"] = {"norm": leaf}


def says(name: str = "config.json", **changes: Any) -> Damage:
    """Changes what a file of JSON says."""
    return lambda folder: edit_json(folder / name, **changes)


def holds(**changes: Any) -> Damage:
    """Changes what tensors there are; see `edit_tensors`."""
    return lambda folder: edit_tensors(folder, **changes)


def file(name: str, content: bytes | int | None) -> Damage:
    """Replaces a file's content, cuts it to so many bytes, or removes it."""

    def damage(folder: pathlib.Path) -> None:
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)

    return damage


def shards(weight_map: Callable[[pathlib.Path], Any]) -> Damage:
    """Renames the weights and writes an index of shards, of the folder."""

    def damage(folder: pathlib.Path) -> None:
        (folder / "model.safetensors").rename(folder / "weights")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map(folder)}))

    return damage


WEIGHTS, TOKENIZER, EMBEDDING = (
    "model.safetensors", "tokenizer_config.json", "target.token_embedder.embedding"
)  # fmt: skip
INFINITE = np.tile([np.float32(np.inf), np.float32(-np.inf)], (40, 8))
DAMAGE = {
    "huggingface": [
        (holds(encoder__final_layer_norm__weight=None), "lacks .* encoder.final_layer_norm.weight"),
        (holds(extra__weight=np.zeros(3, np.float32)), "has a tensor extra.weight, unknown"),
        (
            holds(shared__weight=np.zeros((41, 16), np.float32)),
            r"token_embedder/embedding .* \(41, 16\); .* \(40, 16\)",
        ),
        (holds(shared__weight=np.zeros((40, 16), int)), "token_embedder/embedding .* of type I64"),
        (holds(shared__weight=np.nan * INFINITE), "token_embedder/embedding .* not finite"),
        (holds(shared__weight=INFINITE), "token_embedder/embedding .* not finite"),
        (
            holds(shared__weight=np.zeros((40, 16), np.int8)),
            "token_embedder/embedding .* is of type int8; supported: float32",
        ),
        (file(WEIGHTS, 20000), "model.safetensors .* cut off"),
        (file(WEIGHTS, 3), "model.safetensors is no safetensors file"),
        (file(WEIGHTS, b"\x80\x02}q" * 99), "model.safetensors is no safetensors file"),
        (file(WEIGHTS, None), "has no weights"),
        (says(model_type="bert"), r"of a 'bert' model; only T5, .*\(t5, mt5, umt5\) and GPT-2"),
        (says(model_type=["t5"]), r"of a \['t5'\] model"),
        (
            says(feed_forward_proj="gated-mish"),
            "feed_forward_proj 'gated-mish'; known are relu, gated-gelu, gated-silu",
        ),
        (says(feed_forward_proj=[]), "config.json cannot be read"),
        (says(layer_norm_epsilon=0.1), "epsilon 0.1"),
        (says(d_kv=None), "d_kv None; it must be a positive"),
        (says(num_layers=10**8), "too few for the 100000003 l"),
        (
            says(tie_word_embeddings="no"),
            "config.json .*logits_via_embedding must be True or False, not 'no'",
        ),
        (file("config.json", None), "no checkpoint: .* it holds model.safetensors"),
        (file(TOKENIZER, b'{"extra_ids": 9223372036854775808}'), "extra_ids 922.*8; .* from 0 to"),
        (file(TOKENIZER, b'{"extra_ids": -5}'), "extra_ids -5; .* whole number"),
        (file(TOKENIZER, b"{"), "tokenizer_config.json is not J"),
        (shards(lambda f: {"a": f"../{f.name}/weights"}), "names the file '../made/weights'"),
        (shards(lambda f: {"a": str(f / "weights")}), "names the file '/.*/weights'; .* plain"),
        (shards(lambda f: {"a": None}), "index.json names the file None"),
        (shards(lambda f: ["weights"]), "index.json is no index of shards"),
    ],
    "t5x": [
        (file("checkpoint", None), "is no checkpoint"),
        (file("checkpoint", 500), "checkpoint is not a T5X index"),
        (file("checkpoint", b"wrong magic"), "is not a T5X index"),
        (
            lambda f: shutil.rmtree(f / EMBEDDING),
            r"token_embedder/embedding .*\(target.token_embedder.embedding\) cannot be read",
        ),
        (file(f"{EMBEDDING}/0.0", None), "token_embedder/embedding .* cannot be read"),
        (file(f"{EMBEDDING}/0.0", 40), "token_embedder/embedding .* cannot be read"),
        (
            says(f"{EMBEDDING}/.zarray", shape=[9, 16]),
            r"\(9, 16\) .* on disk, but \(40, 16\)",
        ),
        (
            says(f"{EMBEDDING}/.zarray", chunks=[9, 10**8]),
            "token_embedder/embedding.*its chunks of .*100000000.* are larger than itself",
        ),
        (says(f"{EMBEDDING}/.zarray", dtype="<i4"), "of int32 on disk"),
        (edit_index(lambda x: x["kvstore"].update(path="..")), r"the file '\.\.'"),
        (edit_index(lambda x: x.pop("metadata")), "checkpoint cannot be read: KeyError"),
        (edit_index(lambda x: x.update(dtype=3)), "is of type 3; supported: float32"),
        (edit_index(lambda x: x["metadata"].update(shape=[3])), "made cannot be read"),
        (scanned, "has 100000000 layers; at most 1000 are read"),
    ],
}


@pytest.mark.parametrize(
    ("to", "damage", "message"),
    [(to, damage, message) for to, cases in DAMAGE.items() for damage, message in cases],
)
def test_damage_is_named(tmp_path: pathlib.Path, to: str, damage: Any, message: str) -> None:
    save(tmp_path / "made", V1_1, to)
    damage(tmp_path / "made")
    with pytest.raises(ValueError, match=message) as raised:
        checkpoints.convert(tmp_path / "made", tmp_path / "copy", "native")
    assert str(tmp_path / "made") in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source"]


@pytest.fixture
def open_folder() -> Iterator[pathlib.Path]:
    """A folder that a user without privileges may read; the test runs as one."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        path.chmod(0o755)
        yield path
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("to", "hidden"),
    [
        ("native", "config.json"),
        ("native", "model.safetensors"),
        ("native", ""),
        ("huggingface", "config.json"),
        ("huggingface", "model.safetensors"),
        ("t5x", "checkpoint"),
        ("t5x", "target.token_embedder.embedding/0.0"),
    ],
)
def test_what_may_not_be_read_is_named(open_folder: pathlib.Path, to: str, hidden: str) -> None:
    save(open_folder / "made", V1_1, to)
    (open_folder / "made" / hidden).chmod(0)
    if os.getuid() == 0:  # Root may read everything.
        os.seteuid(65534)
    with pytest.raises(ValueError, match=r"(?i)permission.denied") as raised:
        checkpoints.open(open_folder / "made").numpy()
    for part in hidden.split("/"):
        assert part in str(raised.value)


def test_an_index_without_a_decoder_is_no_t5(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoint_0"
    save(folder, V1_1, "t5x")
    with edited_index(folder) as tree:
        del tree["decoder"]["relpos_bias"]
    with pytest.raises(ValueError, match="no T5 encoder-decoder: .* decoder/relpos_bias"):
        checkpoints.open(folder)


def test_torch_files_without_torch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "made", V1_1, "huggingface")
    (tmp_path / "made" / "model.safetensors").rename(tmp_path / "made" / "pytorch_model.bin")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ValueError, match=r"pytorch_model.bin .* pip install torch"):
        checkpoints.open(tmp_path / "made")


@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_a_full_disk_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = save(tmp_path / "made", V1_1)
    read, calls = Checkpoint.read, []

    def fills(self: Checkpoint, name: str) -> np.ndarray:
        calls.append(name)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", fills)
    with pytest.raises(OSError, match="No space left on device: '.*copy'"):
        checkpoints.FORMATS[to].write(tmp_path / "copy", source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source"]


def test_names_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no checkpoint 'nowhere': .* debian_target"):
        checkpoints.open("nowhere")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no folder google/t5-nano, and the hub did not give"):
        checkpoints.open("google/t5-nano")


def test_a_model_without_encoder_stays_ours(tmp_path: pathlib.Path) -> None:
    reader = V1_1.replace(num_encoder_layers=0, reads=Reads(8))
    source = save(tmp_path / "made", reader)
    for to in ("t5x", "huggingface"):
        with pytest.raises(ValueError, match="without an encoder, as .*made is"):
            checkpoints.FORMATS[to].write(tmp_path / "copy", source)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch's format alone"])
def test_an_id_of_the_hub(
    safe: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights come as safetensors where there are any, and only then in torch's format."""
    wanted: list[list[str]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        wanted.append(list(allow_patterns))
        assert name == "google/some-t5"
        if safe:
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    errors = types.SimpleNamespace(HfHubHTTPError=KeyError, LocalEntryNotFoundError=IndexError)
    hub = types.SimpleNamespace(snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    with pytest.raises(ValueError, match=f"{tmp_path} is no checkpoint"):
        checkpoints.open("google/some-t5")
    assert len(wanted) == (1 if safe else 2)
    assert not any("bin" in pattern for pattern in wanted[0])
    assert safe or "pytorch_model*.bin" in wanted[1]
