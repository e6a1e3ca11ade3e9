"""Decoder-only models against what transformers computed for a GPT-2, and against float64 NumPy."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import checkpoints
from speculative.models import DecoderOnly, DecoderOnlyConfig, pack
from speculative.models.cache import grow
from speculative.types import PyTree
from tests import numpy_decoder_only

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "transformers_gpt2"
CACHE = 48
NEAR = 1e-4
LAMDA = DecoderOnlyConfig(96, 24, 3, 16, 40, 2, mlp_activations=("gelu", "linear"))

start = jax.jit(DecoderOnly.start, static_argnums=(0, 3))
extend = jax.jit(DecoderOnly.extend, static_argnums=0)
forward = jax.jit(DecoderOnly.forward, static_argnums=0)


@functools.cache
def gpt() -> tuple[DecoderOnly, PyTree]:
    """The model that transformers wrote."""
    checkpoint = checkpoints.open(FIXTURE)
    assert isinstance(checkpoint.config, DecoderOnlyConfig)
    return DecoderOnly(checkpoint.config), checkpoint.numpy()


@functools.cache
def lamda() -> tuple[DecoderOnly, PyTree]:
    """A random model whose norms are not at their initial 1."""
    model = DecoderOnly(LAMDA)
    rng = np.random.default_rng(10)
    fresh = jax.jit(model.init)(jax.random.key(0))
    return model, jax.tree.map(
        lambda x: x * rng.uniform(0.5, 1.5, x.shape).astype(np.float32), fresh
    )


@functools.cache
def untied() -> tuple[DecoderOnly, PyTree]:
    """The same, whose logits have a kernel of their own."""
    model, params = lamda()
    kernel = np.random.default_rng(11).normal(0.0, 0.3, (24, 96)).astype(np.float32)
    decoder = params["decoder"] | {"logits_dense": {"kernel": kernel}}
    return DecoderOnly(LAMDA.replace(logits_via_embedding=False)), params | {"decoder": decoder}


MODELS = {"GPT": gpt, "LaMDA": lamda}


@functools.cache
def packed_params(name: str) -> PyTree:
    return pack(MODELS[name]()[1])


@functools.cache
def expected() -> dict[str, np.ndarray]:
    with np.load(FIXTURE / "expected.npz") as file:
        return dict(file)


def ragged(texts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The beginnings of texts [B, L] as prompts, -1 behind them."""
    inputs = texts[:, : lengths.max()]
    return np.where(np.arange(inputs.shape[1]) < lengths[:, None], inputs, -1)


def numpy_logits(model: DecoderOnly, params: PyTree, texts: np.ndarray) -> np.ndarray:
    return np.stack([numpy_decoder_only.logits(params, model.config, text) for text in texts])


def in_chunks(
    model: DecoderOnly, params: PyTree, texts: np.ndarray, lengths: np.ndarray, width: int
) -> list[np.ndarray]:
    """Each row's logits from the end of its prompt on.

    A chunk of `width` tokens at a time, each after a rejected chunk of as many.
    """
    inputs = ragged(texts, lengths)
    state = start(model, params, inputs, CACHE)
    np.testing.assert_array_equal(model.first(jnp.asarray(inputs)), texts[range(3), lengths - 1])
    logits: list[list[np.ndarray]] = [[], [], []]
    for at in range(0, texts.shape[1] - int(lengths.min()) + 1, width):
        # Shorter rows go on while longer ones have come to their end, with any tokens.
        places = np.minimum(lengths[:, None] - 1 + at + np.arange(width), texts.shape[1] - 1)
        chunk = np.take_along_axis(texts, places, axis=1)
        _, rejected = extend(model, params, state, (chunk + 17) % model.vocab_size)
        state = model.rewind(rejected, state.lengths)
        here, state = extend(model, params, state, chunk)
        for row in range(3):
            logits[row].append(np.asarray(here[row]))
    return [
        np.concatenate(row)[: texts.shape[1] - length + 1]
        for row, length in zip(logits, lengths, strict=True)
    ]


@pytest.fixture(params=["as stored", "packed"])
def packed(request: pytest.FixtureRequest) -> bool:
    return request.param == "packed"


def test_forward_is_that_of_transformers(packed: bool) -> None:
    model, params = gpt()
    texts = expected()["texts"]
    logits = forward(model, packed_params("GPT") if packed else params, texts, texts)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected()["logits"]).max() < NEAR


@pytest.mark.parametrize("width", [1, 3, 8])
def test_ragged_prompts_go_on_as_in_transformers(width: int, packed: bool) -> None:
    """In chunks with rewinds; the greedy tokens too."""
    model, params = gpt()
    params = packed_params("GPT") if packed else params
    want = expected()
    lengths = np.array([5, 14, 1])
    for row, got in enumerate(in_chunks(model, params, want["texts"], lengths, width)):
        assert np.abs(got - want["logits"][row, lengths[row] - 1 :]).max() < NEAR
    lengths = (want["inputs"] >= 0).sum(axis=1)
    rows = zip(want["inputs"], want["greedy"], lengths, strict=True)
    texts = [np.concatenate([prompt[:n], greedy]) for prompt, greedy, n in rows]
    longest = max(map(len, texts))
    whole = np.stack([np.pad(text, (0, longest - len(text))) for text in texts])
    for row, got in enumerate(in_chunks(model, params, whole, lengths, width)):
        np.testing.assert_array_equal(got[:24].argmax(axis=-1), want["greedy"][row])


@pytest.mark.parametrize("make", [gpt, lamda, untied])
def test_forward_is_float64_numpy(make: Callable[[], Any], packed: bool) -> None:
    """On more positions than a packed product takes on its left; LaMDA's beyond the last bucket."""
    model, params = make()
    texts = np.random.default_rng(6).integers(0, 96, (2, model.config.max_positions or 150))
    got = forward(model, pack(params) if packed else params, texts, texts)
    assert np.abs(got - numpy_logits(model, params, texts)).max() < NEAR


def test_chunks_of_a_lamda_are_float64_numpy(packed: bool) -> None:
    model, params = lamda()
    texts = np.random.default_rng(7).integers(0, 96, (3, 30))
    lengths = np.array([9, 2, 14])
    want = numpy_logits(model, params, texts)
    params = packed_params("LaMDA") if packed else params
    for row, got in enumerate(in_chunks(model, params, texts, lengths, 3)):
        assert np.abs(got - want[row, lengths[row] - 1 :]).max() < NEAR


@pytest.mark.parametrize("name", MODELS)
def test_packed_segments_are_separate_texts(name: str) -> None:
    model, params = MODELS[name]()
    first, second = np.random.default_rng(8).integers(0, 96, (2, 6))
    row = np.concatenate([first, second[:4], [0, 0]])[None]
    segments = jnp.asarray([[1] * 6 + [2] * 4 + [0] * 2])
    logits = forward(model, params, row, row, (segments, segments))
    for got, text in ((logits[0, :6], first), (logits[0, 6:10], second[:4])):
        want = numpy_decoder_only.logits(params, model.config, text)
        assert np.abs(got - want).max() < NEAR
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", MODELS)
def test_a_grown_cache_decodes_on(name: str) -> None:
    model, params = MODELS[name]()
    texts = expected()["texts"][:, :24]
    inputs, packed = ragged(texts, np.array([9, 9, 9])), packed_params(name)
    small = start(model, packed, inputs, 8)
    _, small = extend(model, packed, small, texts[:, 8:16])
    grown = grow(small, start(model, packed, inputs, CACHE))
    logits, _ = extend(model, packed, grown, texts[:, 16:])
    assert np.abs(logits - numpy_logits(model, params, texts)[:, 16:]).max() < NEAR


def test_beyond_the_last_position_logits_stay_finite() -> None:
    """A last step may guess beyond what may be kept; what precedes must not suffer."""
    model, params = gpt()
    texts = np.random.default_rng(9).integers(0, 96, (2, 70))
    want = numpy_logits(model, params, texts[:, :64])
    state = start(model, params, texts[:, :58], 16)
    logits, _ = extend(model, params, state, texts[:, 57:])
    assert np.isfinite(logits).all()
    assert np.abs(logits[:, :7] - want[:, 57:]).max() < NEAR


@pytest.mark.parametrize(("name", "packed"), [("GPT", True), ("LaMDA", False)])
def test_bfloat16_stays_near_and_gives_float32_logits(name: str, packed: bool) -> None:
    model, params = MODELS[name]()
    texts = expected()["texts"][:, :9]
    want = numpy_logits(model, params, texts)
    params = packed_params(name) if packed else params
    half = DecoderOnly(model.config.replace(dtype="bfloat16"))
    logits = forward(half, params, texts, texts)
    state = start(half, params, texts[:, :1], CACHE)
    chunk, state = extend(half, params, state, texts)
    assert {x.dtype for x in state.keys + state.values} == {jnp.dtype("bfloat16")}
    for got in (logits, chunk):
        assert got.dtype == jnp.float32
        # 8 bits of precision through a few layers.
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
