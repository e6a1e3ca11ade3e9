"""Decoder-only models of today against what transformers computed, in every layout.

A family's golden files are those of its name in `tests/data/decoders`; each has all features of its
kind (`scripts/make_decoder_golden.py`).
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from speculative import checkpoints
from speculative.backends import for_decoding
from speculative.checkpoints import Checkpoint
from speculative.checkpoints.checkpoint import by_name as by_path
from speculative.checkpoints.checkpoint import read_settings
from speculative.decoding import Decoding, Params, loop
from speculative.drafts.copying import CopyDraft
from speculative.drafts.transformer import TransformerDraft
from speculative.models import (
    FAMILIES,
    FlaxModel,
    abstract_params,
    decoder_only,
    model_of,
    names_of,
)
from speculative.models.interface import Chunk
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import by_name
from tests.layouts import LAYOUTS
from tests.saved import forward

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "decoders"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
NEAR = 1e-4
EVERY = 5  # Logits are kept of every fifth position.


@functools.cache
def golden(name: str) -> dict[str, Any]:
    """The settings of a model, texts, logits and greedy tokens."""
    with np.load(FOLDER / f"{name}.npz") as file:
        found = {key: file[key] for key in file}
    settings = json.loads(str(found.pop("config")))
    small = {key: x if key == "logits" else x.astype(np.int32) for key, x in found.items()}
    return {**small, "settings": settings}


def write(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The Hugging Face folder of a golden model."""
    settings = {key: x for key, x in golden(name)["settings"].items() if x is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    kind = next(f.names for f in FAMILIES.values() if settings["model_type"] in f.names.model_types)
    config = kind.configuration(settings, lambda name: False, str(folder))
    shapes, tensors = by_path(abstract_params(config)), {}
    for theirs, (parts, transposed) in kind.names(config).items():
        (part,) = parts
        shape = shapes[part].shape
        tensors[theirs] = by_name.weights(theirs, shape[::-1] if transposed else shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Golden models by name, each written once."""
    parent = tmp_path_factory.mktemp("decoders")

    @functools.cache
    def found(name: str) -> tuple[FlaxModel, PyTree, Checkpoint]:
        checkpoint = checkpoints.open(write(name, parent / name))
        return model_of(checkpoint.config), checkpoint.numpy(), checkpoint

    return found


@functools.partial(jax.jit, static_argnums=0)
def extend(model: FlaxModel, params: PyTree, state: Any, tokens: Any) -> Any:
    return model.extend(params, state, Chunk(tokens))


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(model: FlaxModel, params: PyTree, inputs: Any, cache_length: int) -> Any:
    return model.start(params, inputs, cache_length).state


@pytest.mark.parametrize("layout", ["as stored", "prepacked"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_that_of_transformers(name: str, layout: str, opened: Any) -> None:
    model, params, _ = opened(name)
    texts = golden(name)["texts"]
    logits = forward(model, LAYOUTS[layout](params), texts, texts)[:, ::EVERY]
    assert np.abs(logits - golden(name)["logits"]).max() < NEAR


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_behind_ragged_prompts(name: str, layout: str, width: int, opened: Any) -> None:
    """Each after a chunk that is rejected."""
    model, params, _ = opened(name)
    params, texts = LAYOUTS[layout](params), golden(name)["texts"]
    lengths = np.array([11, 4])
    inputs = np.where(np.arange(11) < lengths[:, None], texts[:, :11], -1)
    state = start(model, params, inputs, 64)
    for begin in range(0, 24, width):
        places = lengths[:, None] - 1 + begin + np.arange(width)
        chunk = np.take_along_axis(texts, places, axis=1)
        _, rejected, _ = extend(model, params, state, (chunk + 17) % 64)
        logits, state, _ = extend(model, params, model.rewind(rejected, state.lengths), chunk)
        for row in range(2):
            for i, place in enumerate(places[row]):
                if place % EVERY == 0:
                    want = golden(name)["logits"][row, place // EVERY]
                    assert np.abs(logits[row, i] - want).max() < NEAR


@pytest.mark.long
@pytest.mark.parametrize("draft", ["none", "copy", "model", "model's tree"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name: str, draft: str, opened: Any) -> None:
    """Forty, with guesses of the prompt's, and of the same model with weights in bfloat16."""
    model, params, _ = opened(name)
    rough = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), params)
    given = Params(for_decoding(params), for_decoding(rough, draft=True))
    tree = 12 if draft == "model's tree" else 0
    how = {"max_length": 40, "eos_ids": (), "gamma": 4 * (draft != "none"), "tree": tree}
    settings = Decoding(64, Sampling(temperature=0.0), **how)
    if draft == "copy":
        drafts, given = CopyDraft(True), Params(given.target, ())
    else:
        drafts = TransformerDraft(model)
    inputs = golden(name)["inputs"]
    draws = settings.draws(0, np.arange(len(inputs)))
    output = loop.generate(model, drafts, given, jnp.asarray(inputs), draws, settings)
    np.testing.assert_array_equal(output.tokens[:, :40], golden(name)["greedy"])
    if draft.startswith("model"):  # Its guesses must be worth something.
        assert output.target_calls.max() < 30


@pytest.mark.parametrize("name", NAMES)
def test_formats_keep_every_bit(name: str, opened: Any, tmp_path: pathlib.Path) -> None:
    _, params, original = opened(name)
    checkpoints.convert(original.location, tmp_path / "ours", "native")
    again = checkpoints.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    assert again.config == original.config
    jax.tree.map(np.testing.assert_array_equal, again.numpy(), params)
    given, written = golden(name)["settings"], read_settings(tmp_path / "theirs")
    same = given.keys() & written.keys() - {"rope_scaling", "rope_parameters"}
    assert {key: written[key] for key in same} == {key: given[key] for key in same}
    # transformers checks the types.
    assert {key: type(written[key]) for key in same} == {key: type(given[key]) for key in same}
    with pytest.raises(ValueError, match="T5X's format holds only T5s"):
        checkpoints.convert(tmp_path / "ours", tmp_path / "t5x", "t5x")


@pytest.mark.parametrize("name", NAMES)
def test_packed_segments_are_separate_texts(name: str, opened: Any) -> None:
    """As in training, where positions begin again with each text."""
    model, params, _ = opened(name)
    texts = golden(name)["texts"][:, :18]
    row = texts.reshape(1, -1)
    segments = jnp.repeat(jnp.array([[1, 2]]), 18, axis=1)
    apart = forward(model, params, texts, texts)
    together = forward(model, params, row, row, (segments, segments))
    np.testing.assert_allclose(together.reshape(apart.shape), apart, atol=NEAR)


def test_a_family_of_names_for_every_golden_file() -> None:
    kinds = {kind for family in FAMILIES.values() for kind in family.names.model_types}
    assert {golden(name)["settings"]["model_type"] for name in NAMES} <= kinds
    assert names_of(model_of(checkpoints.open("debian_lm").config).config).title == "GPT-2"


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("llama", {"attention_bias": True}, "attention_bias True; supported is False"),
        ("llama", {"mlp_bias": True}, "mlp_bias True; supported is False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'; supported is relu"),
        ("llama", {"num_key_value_heads": 4}, "num_kv_heads must be a divisor of num_heads, 6"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of the kind 'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "config.json .*factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotates only part of each head's features"),
        ("llama", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("llama", {"head_dim": 7}, "head_dim must be even"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "has 2 layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "3 layer_types, chunked_attention"),
    ],
)
def test_a_setting_that_is_not_computed_is_named(
    name: str, changes: dict[str, Any], fragment: str, tmp_path: pathlib.Path
) -> None:
    folder = write(name, tmp_path / "made")
    settings = golden(name)["settings"] | changes
    settings = {key: x for key, x in settings.items() if x is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=fragment):
        checkpoints.open(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_is_read_in_parts(
    name: str, layout: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths: what follows, and the hidden states asked for, are the same."""
    model, params, _ = opened(name)
    params, texts = LAYOUTS[layout](params), golden(name)["texts"]
    lengths = np.array([29, 9])
    inputs = np.where(np.arange(32) < lengths[:, None], texts[:, :32], -1)
    layers, found = ("decoder/layers_1", "decoder/decoder_norm"), []
    for at_once in (64, 8):
        monkeypatch.setattr(decoder_only, "AT_ONCE", at_once)
        state, hidden = model.start(params, inputs, 16, layers=layers)
        chunk = np.take_along_axis(texts, lengths[:, None] - 1 + np.arange(3), axis=1)
        found.append((extend(model, params, state, chunk).logits, hidden))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=NEAR)
    for layer in layers:
        for row, length in enumerate(lengths):
            one, other = (np.asarray(hidden[layer])[row, :length] for _, hidden in found)
            np.testing.assert_allclose(one, other, atol=NEAR)
