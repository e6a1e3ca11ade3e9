"""Both generations of T5Gemma against what transformers computed, in every layout.

The stacks of the first differ in all sizes, those of the second in depth.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from speculative import checkpoints
from speculative.backends import for_decoding
from speculative.checkpoints import Checkpoint
from speculative.checkpoints.checkpoint import by_name as by_path
from speculative.decoding import Decoding, Params, loop
from speculative.drafts.transformer import TransformerDraft
from speculative.models import FlaxModel, abstract_params, model_of, sharding, t5gemma2
from speculative.models.interface import Chunk
from speculative.models.t5gemma import SIZES, T5GemmaNames
from speculative.models.t5gemma2 import T5Gemma2Config, T5Gemma2Names
from speculative.sampling import Sampling
from speculative.types import PyTree
from tests import by_name
from tests.layouts import LAYOUTS
from tests.saved import forward

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "encoder_decoders"
NAMES = {"t5gemma": T5GemmaNames(), "t5gemma2": T5Gemma2Names()}
NEAR = 1e-4
EVERY = 5  # Logits are kept of every fifth position.
START = 2


@functools.cache
def golden(name: str) -> dict[str, Any]:
    with np.load(FOLDER / f"{name}.npz") as file:
        found = {key: file[key] for key in file}
    settings = json.loads(str(found.pop("config")))
    small = {key: x if key == "logits" else x.astype(np.int32) for key, x in found.items()}
    return {**small, "settings": settings}


def write(name: str, folder: pathlib.Path, **changes: dict[str, Any]) -> pathlib.Path:
    """The Hugging Face folder of a golden model, or of one with some other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    settings, names = golden(name)["settings"], NAMES[name]
    (folder / "config.json").write_text(json.dumps(settings | changes))
    config = names.configuration(settings, lambda name: False, "golden")
    shapes = by_path(abstract_params(config))
    tensors = {}
    for theirs, ((part,), transposed) in names.names(config).items():
        shape = shapes[part].shape
        tensors[theirs] = by_name.weights(theirs, shape[::-1] if transposed else shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Golden models by name, each written once."""
    parent = tmp_path_factory.mktemp("golden")

    @functools.cache
    def found(name: str) -> tuple[FlaxModel, PyTree, Checkpoint]:
        checkpoint = checkpoints.open(write(name, parent / name))
        return model_of(checkpoint.config, START), checkpoint.numpy(), checkpoint

    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_that_of_transformers(name: str, layout: str, opened: Any) -> None:
    model, params, _ = opened(name)
    logits = forward(model, LAYOUTS[layout](params), golden(name)["inputs"], golden(name)["texts"])
    assert np.abs(logits[:, ::EVERY] - golden(name)["logits"]).max() < NEAR


@pytest.mark.parametrize("remat", ["none", "layers", "products"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_segments_are_separate_texts(name: str, remat: str, opened: Any) -> None:
    """As in training, whatever the gradient computes again."""
    model, params, _ = opened(name)
    inputs, texts = golden(name)["inputs"][:2], golden(name)["texts"][:2]
    sizes = (inputs >= 0).sum(axis=1)
    source = np.concatenate([row[row >= 0] for row in inputs])[None]
    segments = np.repeat([1, 2], sizes)[None], np.repeat([1, 2], texts.shape[1])[None]
    training = dataclasses.replace(model, backend=sharding.InTraining(remat=remat))

    def loss(params: PyTree, model: FlaxModel, inputs: Any, texts: Any, segments: Any) -> Any:
        key = jax.random.key(0)  # It turns training on; there is no dropout.
        return (model.forward_with_hidden(params, inputs, texts, segments, key)[0] ** 2).sum()

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    apart = gradient(params, model, inputs, texts, None)
    together = gradient(params, training, source, texts.reshape(1, -1), segments)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        assert np.abs(one - other).max() < NEAR * max(1, np.abs(one).max())


@functools.partial(jax.jit, static_argnums=0)
def extend(model: FlaxModel, params: PyTree, state: Any, tokens: Any) -> Any:
    return model.extend(params, state, Chunk(tokens))


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_that_too(name: str, layout: str, width: int, opened: Any) -> None:
    model, params, _ = opened(name)
    params, texts = LAYOUTS[layout](params), golden(name)["texts"]
    state = model.start(params, golden(name)["inputs"], 40).state
    for begin in range(0, 20, width):
        chunk = texts[:, begin : begin + width]
        _, rejected, _ = extend(model, params, state, (chunk + 17) % 64)
        logits, state, _ = extend(model, params, model.rewind(rejected, state.lengths), chunk)
        for i in range(-begin % EVERY, width, EVERY):
            wanted = golden(name)["logits"][:, (begin + i) // EVERY]
            assert np.abs(logits[:, i] - wanted).max() < NEAR


@pytest.mark.parametrize(
    ("gamma", "tree"), [(0, 0), pytest.param(4, 0, marks=pytest.mark.long), (4, 12)]
)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(
    name: str, gamma: int, tree: int, opened: Any
) -> None:
    model, params, _ = opened(name)
    rough = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), params)
    given = Params(for_decoding(params), for_decoding(rough, draft=True))
    how = {"max_length": 40, "eos_ids": (), "gamma": gamma, "tree": tree}
    settings, inputs = Decoding(64, Sampling(temperature=0.0), **how), golden(name)["inputs"]
    draws = settings.draws(0, np.arange(len(inputs)))
    draft = TransformerDraft(model)
    output = loop.generate(model, draft, given, jnp.asarray(inputs), draws, settings)
    np.testing.assert_array_equal(output.tokens[:, :40], golden(name)["greedy"])
    assert gamma == 0 or output.target_calls.max() < 30


@pytest.mark.parametrize("name", NAMES)
def test_formats_keep_every_bit(name: str, opened: Any, tmp_path: pathlib.Path) -> None:
    _, params, original = opened(name)
    assert original.special.start_id == START
    checkpoints.convert(original.location, tmp_path / "ours", "native")
    again = checkpoints.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    assert again.config == original.config
    jax.tree.map(np.testing.assert_array_equal, again.numpy(), params)


@pytest.mark.parametrize(
    "config",
    [
        # The decoder is shallower than the cycle of windows.
        T5Gemma2Config(
            *(64, 16, 2, 8, 24, 7, 4),
            max_positions=32,
            windows=(5, 5, 5, 5, 5, 0),
            window_rope_base=100.0,
            rope_factor=8.0,
            query_scalar=8.0,
        ),
        T5Gemma2Config(64, 16, 2, 8, 24, 1, 2, max_positions=32, windows=(4, 0)),
    ],
)
def test_settings_give_the_configuration_back(config: T5Gemma2Config) -> None:
    names = T5Gemma2Names()
    found = names.configuration(names.settings(config, "here"), lambda name: False, "here")
    for i in range(7):
        assert (found.window(i), found.rope(i)) == (config.window(i), config.rope(i))
    assert found.score_scale == config.score_scale
    same = {name: getattr(config, name) for name in ("query_scalar", "window_rope_base")}
    assert found.replace(**same, num_kv_heads=0) == config


def test_an_encoders_even_window_reaches_one_position_further_ahead() -> None:
    config = t5gemma2.SIZES["t5gemma2_270m_270m"]
    assert config.encoder_window(0) == (255, 256)


def test_sizes_of_the_second_generation() -> None:
    """As its report counts them, with the one embedding: 370M, 1.7B and 7B."""
    for name, billions in (("270m_270m", 0.37), ("1b_1b", 1.7), ("4b_4b", 7.1)):
        leaves = by_path(abstract_params(t5gemma2.SIZES[f"t5gemma2_{name}"]))
        assert abs(sum(leaf.size for leaf in leaves.values()) / 1e9 / billions - 1) < 0.02, name


def test_sizes_that_have_names() -> None:
    """About as many parameters as their names say, without the two embeddings."""
    for name, billions in (("2b_2b", 4.4), ("9b_9b", 18.1), ("9b_2b", 11.5)):
        config = SIZES[f"t5gemma_{name}"]
        leaves = by_path(abstract_params(config))
        found = sum(leaf.size for key, leaf in leaves.items() if "embedder" not in key)
        assert abs(found / 1e9 / billions - 1) < 0.1, (name, found)


@pytest.mark.parametrize(
    ("stack", "changes", "fragment"),
    [
        ("encoder", {"rope_theta": 5.0}, "rope_base 5.0 of the encoder and 1000.0 of the decoder"),
        ("decoder", {"attention_bias": True}, "attention_bias True; supported is False"),
        ("decoder", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'; supported is"),
    ],
)
def test_what_is_not_computed(
    stack: str, changes: dict[str, Any], fragment: str, tmp_path: pathlib.Path
) -> None:
    settings = golden("t5gemma")["settings"]
    folder = write("t5gemma", tmp_path / "made", **{stack: settings[stack] | changes})
    with pytest.raises(ValueError, match=fragment):
        checkpoints.open(folder)


def test_what_only_images_need_is_left_out(opened: Any, tmp_path: pathlib.Path) -> None:
    """Copies of the one embedding too; an embedding that differs is an error."""
    _, params, _ = opened("t5gemma2")
    folder = write("t5gemma2", tmp_path / "made")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.encoder.embed_tokens.weight"]
    small = np.ones((2, 2), np.float32)
    tensors["model.encoder.vision_tower.encoder.layers.0.mlp.fc1.weight"] = small
    tensors["model.encoder.embed_tokens.eoi_embedding"] = small
    tensors["model.decoder.embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors")
    found = checkpoints.open(folder)
    jax.tree.map(np.testing.assert_array_equal, found.numpy(), params)
    assert "reads more than text; 2 tensors for that are left out" in found.note
    save_file(tensors | {"lm_head.out_proj.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="several embeddings; T5Gemma 2 has one"):
        checkpoints.open(folder)
