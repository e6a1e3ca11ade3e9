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
from speculative.backends import prepack
from speculative.models import DecoderOnly, DecoderOnlyConfig
from speculative.models.gpt import LAMDA as FIELDS
from speculative.models.interface import Chunk, Extended
from speculative.ragged import resized
from speculative.types import PyTree
from tests import numpy_models, saved
from tests.layouts import LAYOUTS, Layout
from tests.saved import forward

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "transformers_gpt2"
CACHE = 48
NEAR = 1e-4
EVERY = 5  # Logits are kept of every fifth position.
LAMDA = DecoderOnlyConfig(96, 24, 3, 16, 40, 2, **FIELDS)


@functools.partial(jax.jit, static_argnums=0, static_argnames="layers")
def extend(
    model: DecoderOnly, params: PyTree, state: Any, tokens: Any, at: Any = None, layers: Any = ()
) -> Extended:
    return model.extend(params, state, Chunk(tokens), at, layers)


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(model: DecoderOnly, params: PyTree, inputs: Any, cache_length: int) -> Any:
    return model.start(params, inputs, cache_length).state


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
    fresh = saved.random(LAMDA, 0)
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
def prepacked_params(name: str) -> PyTree:
    return prepack(MODELS[name]()[1])


@functools.cache
def expected() -> dict[str, np.ndarray]:
    with np.load(FIXTURE / "expected.npz") as file:
        return dict(file)


def ragged(texts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The beginnings of texts [B, L] as prompts, -1 behind them."""
    inputs = texts[:, : lengths.max()]
    return np.where(np.arange(inputs.shape[1]) < lengths[:, None], inputs, -1)


def numpy_logits(model: DecoderOnly, params: PyTree, texts: np.ndarray) -> np.ndarray:
    return np.stack([numpy_models.decode(params, model.config, None, text) for text in texts])


def in_chunks(
    model: DecoderOnly, params: PyTree, texts: np.ndarray, lengths: np.ndarray, width: int
) -> list[np.ndarray]:
    """Each row's logits from the end of its prompt on.

    A chunk of `width` tokens at a time, each after a rejected chunk of as many.
    """
    inputs = ragged(texts, lengths)
    state = start(model, params, inputs, CACHE)
    np.testing.assert_array_equal(model.first(jax.device_put(inputs)), texts[range(3), lengths - 1])
    logits: list[list[np.ndarray]] = [[], [], []]
    for at in range(0, texts.shape[1] - int(lengths.min()) + 1, width):
        # Shorter rows go on while longer ones have come to their end, with any tokens.
        places = np.minimum(lengths[:, None] - 1 + at + np.arange(width), texts.shape[1] - 1)
        chunk = np.take_along_axis(texts, places, axis=1)
        _, rejected, _ = extend(model, params, state, (chunk + 17) % model.config.vocab_size)
        state = model.rewind(rejected, state.lengths)
        here, state, _ = extend(model, params, state, chunk)
        for row in range(3):
            logits[row].append(np.asarray(here[row]))
    return [
        np.concatenate(row)[: texts.shape[1] - length + 1]
        for row, length in zip(logits, lengths, strict=True)
    ]


def test_forward_is_that_of_transformers(prepacked_or_not: Layout) -> None:
    model, params = gpt()
    texts = expected()["texts"]
    logits = forward(model, prepacked_or_not(params), texts, texts)
    assert logits.dtype == jnp.float32
    assert np.abs(logits[:, ::EVERY] - expected()["logits"]).max() < NEAR


@pytest.mark.parametrize("width", [1, 3, 8])
def test_ragged_prompts_go_on_as_in_transformers(width: int, laid_out: Layout) -> None:
    """In chunks with rewinds; the greedy tokens too."""
    model, params = gpt()
    params = laid_out(params)
    want = expected()
    lengths = np.array([5, 14, 1])
    for row, got in enumerate(in_chunks(model, params, want["texts"], lengths, width)):
        begin = lengths[row] - 1
        kept = want["logits"][row, -(-begin // EVERY) :]
        assert np.abs(got[-begin % EVERY :: EVERY] - kept).max() < NEAR
    lengths = (want["inputs"] >= 0).sum(axis=1)
    rows = zip(want["inputs"], want["greedy"], lengths, strict=True)
    texts = [np.concatenate([prompt[:n], greedy]) for prompt, greedy, n in rows]
    longest = max(map(len, texts))
    whole = np.stack([np.pad(text, (0, longest - len(text))) for text in texts])
    for row, got in enumerate(in_chunks(model, params, whole, lengths, width)):
        np.testing.assert_array_equal(got[:24].argmax(axis=-1), want["greedy"][row])


@pytest.mark.parametrize("make", [gpt, lamda, untied])
def test_forward_is_float64_numpy(make: Callable[[], Any], prepacked_or_not: Layout) -> None:
    """On more positions than XLA takes on its left; LaMDA's beyond the last bucket."""
    model, params = make()
    texts = np.random.default_rng(6).integers(0, 96, (2, model.config.max_positions or 150))
    got = forward(model, prepacked_or_not(params), texts, texts)
    assert np.abs(got - numpy_logits(model, params, texts)).max() < NEAR


def test_chunks_of_a_lamda_are_float64_numpy(laid_out: Layout) -> None:
    model, params = lamda()
    texts = np.random.default_rng(7).integers(0, 96, (3, 30))
    lengths = np.array([9, 2, 14])
    want = numpy_logits(model, params, texts)
    params = laid_out(params)
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
        want = numpy_models.decode(params, model.config, None, text)
        assert np.abs(got - want).max() < NEAR
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", MODELS)
def test_a_grown_cache_decodes_on(name: str) -> None:
    model, params = MODELS[name]()
    texts = expected()["texts"][:, :24]
    inputs, prepacked = ragged(texts, np.array([9, 9, 9])), prepacked_params(name)
    small = start(model, prepacked, inputs, 8)
    _, small, _ = extend(model, prepacked, small, texts[:, 8:16])
    grown = resized(small, start(model, prepacked, inputs, CACHE))
    logits, _, _ = extend(model, prepacked, grown, texts[:, 16:])
    assert np.abs(logits - numpy_logits(model, params, texts)[:, 16:]).max() < NEAR


def test_beyond_the_last_position_logits_stay_finite() -> None:
    """A last step may guess beyond what may be kept; what precedes must not suffer."""
    model, params = gpt()
    texts = np.random.default_rng(9).integers(0, 96, (2, 70))
    want = numpy_logits(model, params, texts[:, :64])
    state = start(model, params, texts[:, :58], 16)
    logits, _, _ = extend(model, params, state, texts[:, 57:])
    assert np.isfinite(logits).all()
    assert np.abs(logits[:, :7] - want[:, 57:]).max() < NEAR


@pytest.mark.parametrize(("name", "laid_out"), [("GPT", prepack), ("LaMDA", LAYOUTS["as stored"])])
def test_bfloat16_stays_near_and_gives_float32_logits(name: str, laid_out: Layout) -> None:
    model, params = MODELS[name]()
    texts = expected()["texts"][:, :9]
    want = numpy_logits(model, params, texts)
    params = laid_out(params)
    half = DecoderOnly(model.config.replace(dtype="bfloat16"))
    logits = forward(half, params, texts, texts)
    state = start(half, params, texts[:, :1], CACHE)
    chunk, state, _ = extend(half, params, state, texts)
    assert {x.dtype for x in state.keys + state.values} == {jnp.dtype("bfloat16")}
    for got in (logits, chunk):
        assert got.dtype == jnp.float32
        # 8 bits of precision through a few layers.
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_float64_numpy(name: str, prepacked_or_not: Layout) -> None:
    """Those of `start` for whole prompts, those of chunks from the last token of each on."""
    model, params = MODELS[name]()
    given = prepacked_or_not(params)
    texts, lengths = expected()["texts"][:, :20], np.array([5, 14, 1])
    begin = jax.jit(model.start, static_argnames=("cache_length", "layers"))
    state, begun = begin(given, ragged(texts, lengths), CACHE, layers=model.extend_layers)
    places = np.minimum(lengths[:, None] - 1 + np.arange(6), 19)
    prompted, chunks = jax.device_get(begun), []
    for chunk in np.split(np.take_along_axis(texts, places, axis=1), 2, axis=1):
        _, state, hidden = extend(model, given, state, chunk, layers=model.extend_layers)
        chunks.append(jax.device_get(hidden))
    for row, length in enumerate(lengths):
        wanted: dict[str, np.ndarray] = {}
        numpy_models.decode(params, model.config, None, texts[row], wanted)
        assert wanted.keys() == set(model.extend_layers) == prompted.keys()
        for layer, want in wanted.items():
            assert np.abs(prompted[layer][row, :length] - want[:length]).max() < NEAR
            got = np.concatenate([hidden[layer][row] for hidden in chunks])
            assert np.abs(got - want[length - 1 : length + 5]).max() < NEAR


def test_no_hidden_state_comes_unasked_and_no_unknown_one() -> None:
    model, params = gpt()
    prompts = jnp.asarray(expected()["texts"][:, :4])
    assert jax.eval_shape(lambda: model.start(params, prompts, 8)).hidden == {}
    with pytest.raises(ValueError, match="'encoder'; known are decoder/layers_0, .*norm"):
        model.start(params, prompts, 8, layers=("encoder",))


def test_a_turn_of_a_chat_goes_on_behind_what_was_read(laid_out: Layout) -> None:
    """From a longer cache of another text that begins alike; only the rest is read."""
    model, params = lamda()
    given, rng = laid_out(params), np.random.default_rng(12)
    before = rng.integers(0, 96, (1, 220))
    text = np.concatenate([before[:, :150], rng.integers(0, 96, (1, 40))], axis=1)
    inputs = np.pad(text[:, :180], ((0, 0), (0, 76)), constant_values=-1)
    begin = jax.jit(model.start, static_argnames=("cache_length", "layers"))
    resume = jax.jit(model.resume, static_argnames="cache_length")
    wanted: dict[str, np.ndarray] = {}
    logits = numpy_models.decode(params, model.config, None, text[0], wanted)
    begun = begin(given, before, 300, layers=model.extend_layers)
    found = resume(given, begun, 150, inputs, cache_length=CACHE)
    got, _, _ = extend(model, given, found.state, text[:, 179:])
    assert np.abs(got[0] - logits[179:]).max() < NEAR
    for name, hidden in found.hidden.items():
        assert hidden.shape[1] == inputs.shape[1]
        assert np.abs(hidden[0, :180] - wanted[name][:180]).max() < NEAR
    blank = resume(given, jax.tree.map(jnp.zeros_like, begun), 150, inputs, cache_length=CACHE)
    keys = np.asarray(blank.state.keys[0])
    assert not keys[:, :, :128].any() and keys[:, :, 128:180].any(axis=(0, 1, 3)).all()
