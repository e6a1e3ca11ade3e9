"""T5 against what T5X computed for a checkpoint of its own, and against float64 NumPy."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from speculative import checkpoints
from speculative.backends import Prepacked, for_decoding, prepack
from speculative.backends.cpu import kernels
from speculative.checkpoints import native
from speculative.models import T5, T5Config
from speculative.models.interface import Chunk, Extended
from speculative.models.reads import Reads
from speculative.models.stack import DecoderState
from speculative.ragged import resized
from speculative.types import PADDING, QUANTIZE, PyTree
from tests import numpy_models, saved
from tests.layouts import LAYOUTS, Layout
from tests.saved import forward

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "t5x_v1_1"
CACHE = 48
NEAR = 1e-4

V1_0 = T5Config(96, 24, 3, 8, 40, 2, 2, mlp_activations=("relu",), logits_via_embedding=True)

UMT5 = V1_0.replace(
    mlp_activations=("silu", "linear"), logits_via_embedding=False, shared_positions=False
)


@functools.partial(jax.jit, static_argnums=0, static_argnames="layers")
def extend(
    model: T5, params: PyTree, state: Any, tokens: Any, at: Any = None, layers: Any = ()
) -> Extended:
    return model.extend(params, state, Chunk(tokens), at, layers)


@functools.partial(jax.jit, static_argnums=(0, 3))
def start(
    model: T5, params: PyTree, inputs: Any, cache_length: int, encoded: Array | None = None
) -> Any:
    return model.start(params, inputs, cache_length, encoded).state


@functools.cache
def v1_1() -> tuple[T5, PyTree]:
    """The model that T5X wrote."""
    config = T5Config(**json.loads((FIXTURE / "config.json").read_text())["config"])
    return T5(config), checkpoints.open(FIXTURE / "checkpoint_1000").numpy()


@functools.cache
def random(config: T5Config) -> tuple[T5, PyTree]:
    """A random model whose norms are not at their initial 1."""
    model = T5(config)
    rng = np.random.default_rng(10)

    def unsettle(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        if path[-1].key == "scale":
            return leaf * rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        return leaf

    return model, jax.tree_util.tree_map_with_path(unsettle, saved.random(config, 0))


v1_0 = functools.partial(random, V1_0)
# Positions in every layer as umT5 has them, behind gates of UL2.
MODELS = {"v1.1": v1_1, "v1.0": v1_0, "umT5": functools.partial(random, UMT5)}


@functools.cache
def expected() -> dict[str, np.ndarray]:
    with np.load(FIXTURE / "expected.npz") as file:
        return dict(file)


def sources() -> np.ndarray:
    """Rows of different lengths, padding behind them."""
    rng = np.random.default_rng(5)
    inputs = rng.integers(2, 96, (3, 12))
    inputs[0, 7:] = inputs[2, 10:] = PADDING
    return inputs.astype(np.int32)


def padded(inputs: np.ndarray) -> np.ndarray:
    """T5X's inputs with our padding in place of its own, 0."""
    return np.where(inputs == 0, PADDING, inputs)


def decoder_inputs(length: int) -> np.ndarray:
    tokens = np.random.default_rng(6).integers(2, 96, (3, length))
    tokens[:, 0] = 0
    return tokens.astype(np.int32)


def numpy_logits(model: T5, params: PyTree, inputs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    rows = zip(inputs, tokens, strict=True)
    return np.stack([numpy_models.logits(params, model.config, s[s >= 0], t) for s, t in rows])


def in_chunks(
    model: T5, params: PyTree, inputs: np.ndarray, tokens: np.ndarray, width: int
) -> np.ndarray:
    """Logits of tokens [B, L] fed `width` at a time, each after a rejected chunk of as many."""
    state = start(model, params, inputs, CACHE)
    logits = []
    for begin in range(0, tokens.shape[1], width):
        chunk = tokens[:, begin : begin + width]
        _, rejected, _ = extend(model, params, state, (chunk + 17) % model.config.vocab_size)
        state = model.rewind(rejected, state.lengths)
        here, state, _ = extend(model, params, state, chunk)
        logits.append(np.asarray(here))
    assert (state.lengths == tokens.shape[1]).all()
    return np.concatenate(logits, axis=1)


def test_the_fixture_has_the_tree_that_init_gives() -> None:
    model, params = v1_1()
    fresh = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)


def test_logits_are_those_of_t5x(prepacked_or_not: Layout) -> None:
    model, params = v1_1()
    want = expected()
    given = padded(want["encoder_input_tokens"]), want["decoder_input_tokens"]
    logits = forward(model, prepacked_or_not(params), *given)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - want["logits"]).max() < NEAR


@pytest.mark.parametrize("width", [1, 3, 8])
def test_decoding_is_that_of_t5x_in_chunks_with_rewinds(width: int, laid_out: Layout) -> None:
    model, params = v1_1()
    params = laid_out(params)
    want = expected()
    source = padded(want["encoder_input_tokens"])
    logits = in_chunks(model, params, source, want["decoder_input_tokens"], width)
    assert np.abs(logits - want["logits"]).max() < NEAR
    greedy = want["greedy_24"]
    fed = np.concatenate([np.zeros((2, 1), greedy.dtype), greedy[:, :-1]], axis=1)
    logits = in_chunks(model, params, source, fed, width)
    np.testing.assert_array_equal(logits.argmax(axis=-1), greedy)


@pytest.mark.parametrize("name", ["v1.0", "umT5"])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_decoding_in_chunks_is_float64_t5(width: int, name: str) -> None:
    model, params = MODELS[name]()
    tokens = decoder_inputs(24)
    got = in_chunks(model, prepack(params), sources(), tokens, width)
    assert np.abs(got - numpy_logits(model, params, sources(), tokens)).max() < NEAR


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_float64_t5(name: str, prepacked_or_not: Layout) -> None:
    """On more positions than a prepacked product takes on its left, beyond the last bucket."""
    model, params = MODELS[name]()
    tokens = decoder_inputs(150)
    want = numpy_logits(model, params, sources(), tokens)
    got = forward(model, prepacked_or_not(params), sources(), tokens)
    assert np.abs(got - want).max() < NEAR


# How parameters are held for a platform, of a target or a draft.
HELD = [("cpu", False), ("gpu", False), ("tpu", False), ("tpu", True)]


@pytest.mark.parametrize("quantize", QUANTIZE[1:])
@pytest.mark.parametrize(("platform", "draft"), HELD)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_it_is_the_model_whose_kernels_are_stored_as_int8(
    name: str, platform: str, draft: bool, quantize: str
) -> None:
    model, params = MODELS[name]()
    stored = {"/".join(path): np.asarray(x) for path, x in flatten_dict(params).items()}
    for path, value in stored.items():
        whole = native.quantize(path, value)
        if len(whole) > 1 and (path.endswith("kernel") or model.config.logits_via_embedding):
            stored[path] = whole[path] * whole[path + native.SCALE]
    near = unflatten_dict({tuple(path.split("/")): x for path, x in stored.items()})
    tokens = decoder_inputs(24)
    want = numpy_logits(model, near, sources(), tokens)
    got = in_chunks(model, for_decoding(params, draft, platform, quantize), sources(), tokens, 3)
    if quantize == "int8":
        assert np.abs(got - want).max() < NEAR
        return
    # Positions are rounded too, to 255 multiples of their greatest, in each of a dozen products.
    assert (got - want).std() < 0.08 * want.std()
    whole = numpy_logits(model, params, sources(), tokens)
    assert np.corrcoef((want - whole).ravel(), (got - whole).ravel())[0, 1] > 0.4
    # Another platform rounds the same numbers, but for sums that end near the middle of two.
    gpu = in_chunks(model, for_decoding(params, False, "gpu", quantize), sources(), tokens, 3)
    assert (got - gpu).std() < 0.02 * want.std()


@pytest.mark.long
@pytest.mark.parametrize("name", ["v1.1", "umT5"])
def test_a_long_source_is_float64_t5(name: str, laid_out: Layout) -> None:
    """700 tokens in a width of 1,024, of which XLA attends to 256 at a time."""
    model, params = MODELS[name]()
    tokens, source = decoder_inputs(4)[:1], np.zeros((1, 1024), np.int32)
    source[:, :700] = np.random.default_rng(3).integers(2, 96, 700)
    want = numpy_logits(model, params, source, tokens)
    got = extend(model, laid_out(params), start(model, laid_out(params), source, 8), tokens).logits
    assert np.abs(got - want).max() < NEAR


@pytest.mark.skipif(not kernels.native(), reason="no C++ compiler")
def test_padding_is_not_read() -> None:
    """Sources of 1 to 32 tokens are what they are without padding, and of padding 0 is made."""
    model, params = v1_1()
    tokens = np.random.default_rng(0).integers(2, 50, (4, 32)).astype(np.int32)
    begin = jax.jit(model.start, static_argnums=2, static_argnames="layers")

    def parts(inputs: np.ndarray) -> list[np.ndarray]:
        """What is made of sources [4, S]: [4, S, ...] each."""
        state, hidden = begin(prepack(params), inputs, 8, layers=("encoder",))
        heads = [x.swapaxes(1, 2) for x in jax.tree.leaves(state.cross)]
        return [np.asarray(x) for x in (hidden["encoder"], *heads)]

    lengths = np.array([20, 1, 32, 25])
    there = np.arange(32) < lengths[:, None]
    found = parts(np.where(there, tokens, PADDING))
    for row, length in enumerate(lengths):
        # The bits of XLA's last norm depend on how many positions there are.
        cut, beside = parts(tokens[:, :length]), tokens.copy()
        beside[row, length:] = PADDING
        for got, alone, among in zip(found, cut, parts(beside), strict=True):
            np.testing.assert_array_equal(got[row], among[row])
            np.testing.assert_array_equal(got[row, length:], 0)
            np.testing.assert_allclose(got[row, :length], alone[row], atol=1e-5)


def test_rows_advance_raggedly() -> None:
    model, params = v1_1()
    tokens = decoder_inputs(16)
    kept = np.array([3, 8, 1])
    state = start(model, prepack(params), sources(), CACHE)
    _, state, _ = extend(model, prepack(params), state, tokens[:, :8])
    state = model.rewind(state, jax.device_put(kept))
    logits, state, _ = extend(model, prepack(params), state, tokens[:, 8:])
    np.testing.assert_array_equal(state.lengths, kept + 8)
    for row, source in enumerate(sources()):
        fed = np.concatenate([tokens[row, : kept[row]], tokens[row, 8:]])
        want = numpy_models.logits(params, model.config, source[source >= 0], fed)
        assert np.abs(logits[row] - want[-8:]).max() < NEAR


def test_at_gives_one_position_of_the_chunk() -> None:
    model, params = v1_1()
    params = prepack(params)
    state = start(model, params, sources(), CACHE)
    tokens = decoder_inputs(8)
    every, after, _ = extend(model, params, state, tokens)
    at = jnp.array([7, 0, 2])
    one, after_too, _ = extend(model, params, state, tokens, at)
    assert one.shape == (3, 1, model.config.vocab_size)
    np.testing.assert_allclose(one[:, 0], every[np.arange(3), at], atol=1e-5)
    for left, right in zip(jax.tree.leaves(after), jax.tree.leaves(after_too), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_a_grown_cache_decodes_on() -> None:
    model, params = v1_1()
    tokens = decoder_inputs(16)
    small: DecoderState = start(model, prepack(params), sources(), 8)
    _, small, _ = extend(model, prepack(params), small, tokens[:, :8])
    large: DecoderState = start(model, prepack(params), sources(), CACHE)
    grown = resized(small, large)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, large)
    for before, after in zip(small.keys + small.values, grown.keys + grown.values, strict=True):
        np.testing.assert_array_equal(before, after[..., :8, :])
    logits, _, _ = extend(model, prepack(params), grown, tokens[:, 8:])
    want = numpy_logits(model, params, sources(), tokens)[:, 8:]
    assert np.abs(logits - want).max() < NEAR


@pytest.mark.parametrize("name", MODELS)
def test_packed_segments_are_separate_examples(name: str) -> None:
    """Two examples in a row, then padding, give what each gives alone."""
    model, params = MODELS[name]()
    rng = np.random.default_rng(8)
    first, second = rng.integers(2, 96, 5), rng.integers(2, 96, 4)
    out_first, out_second = decoder_inputs(6)[0], decoder_inputs(3)[1]
    pad = np.zeros(2, np.int64)
    inputs, outputs = [first, second, pad], [out_first, out_second, pad]
    segments = [[1] * 5 + [2] * 4 + [0] * 2], [[1] * 6 + [2] * 3 + [0] * 2]
    given = (np.concatenate(parts)[None] for parts in (inputs, outputs))
    logits = forward(model, params, *given, tuple(map(jnp.array, segments)))
    for got, *text in ((logits[0, :6], first, out_first), (logits[0, 6:9], second, out_second)):
        assert np.abs(got - numpy_models.logits(params, model.config, *text)).max() < NEAR
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(("name", "laid_out"), [("v1.1", LAYOUTS["as stored"]), ("v1.0", prepack)])
def test_bfloat16_stays_near_and_gives_float32_logits(name: str, laid_out: Layout) -> None:
    model, params = MODELS[name]()
    want = numpy_logits(model, params, sources(), decoder_inputs(9))
    params = laid_out(params)
    half = T5(model.config.replace(dtype="bfloat16"))
    logits = forward(half, params, sources(), decoder_inputs(9))
    state = start(half, params, sources(), CACHE)
    chunk, state, _ = extend(half, params, state, decoder_inputs(9))
    cross = tuple(x for pair in state.cross for x in pair)
    assert {x.dtype for x in state.keys + state.values + cross} == {jnp.dtype("bfloat16")}
    for got in (logits, chunk):
        assert got.dtype == jnp.float32
        # 8 bits of precision through a few layers; float32 logits are not rounded to bfloat16.
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
        assert (got.astype(jnp.bfloat16).astype(jnp.float32) != got).any()


def test_dropout_is_a_function_of_its_key() -> None:
    model, params = v1_0()
    noisy = T5(model.config.replace(dropout_rate=0.3))
    arguments = (params, sources(), decoder_inputs(9))
    calm = numpy_logits(model, *arguments)
    assert np.abs(forward(noisy, *arguments) - calm).max() < NEAR
    first = forward(noisy, *arguments, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(first, forward(noisy, *arguments, dropout_key=jax.random.key(1)))
    second = forward(noisy, *arguments, dropout_key=jax.random.key(2))
    assert np.abs(first - calm).max() > 0.01
    assert np.abs(first - second).max() > 0.01


@pytest.mark.parametrize("name", MODELS)
def test_prepacking_keeps_every_number(name: str) -> None:
    """Beside them there may be zeros that fill up a panel, and a tied embedding's second copy."""
    _, params = MODELS[name]()
    before = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
    for tree in (prepack(params), for_decoding(params)):
        after = np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        np.testing.assert_array_equal(np.unique(after[after != 0]), np.unique(before[before != 0]))
    assert isinstance(prepack(params), Prepacked) == kernels.native()


def test_without_an_encoder_it_reads_another_ones() -> None:
    """With the whole model's encoder and its own decoder it is the whole model."""
    whole, params = v1_1()
    part = T5(whole.config.replace(num_encoder_layers=0, reads=Reads(whole.config.emb_dim)))
    decoder = {name: tree for name, tree in params.items() if name != "encoder"}
    shapes = jax.eval_shape(part.init, jax.random.key(0))
    assert jax.tree.map(np.shape, decoder) == jax.tree.map(np.shape, shapes)
    tokens = np.random.default_rng(0).integers(2, 90, (3, 9)).astype(np.int32)
    want = forward(whole, params, sources(), tokens)
    encoded = jax.jit(whole.encode)(params, sources())
    got = forward(part, decoder, sources(), tokens, encoded=encoded)
    assert np.abs(got - want).max() < NEAR
    state = start(part, prepack(decoder), sources(), CACHE, encoded)
    got, _, _ = extend(part, prepack(decoder), state, tokens)
    assert np.abs(got - want).max() < NEAR


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_float64_t5(name: str, prepacked_or_not: Layout) -> None:
    """The encoder's of `start`, and every decoder layer's of chunks, put together."""
    model, params = MODELS[name]()
    given, tokens = prepacked_or_not(params), decoder_inputs(9)
    begin = jax.jit(model.start, static_argnames=("cache_length", "layers"))
    state, begun = begin(given, sources(), CACHE, layers=("encoder",))
    encoded, chunks = np.asarray(begun["encoder"]), []
    for chunk in np.split(tokens, 3, axis=1):
        _, state, hidden = extend(model, given, state, chunk, layers=model.extend_layers)
        assert hidden.keys() == set(model.extend_layers)
        chunks.append(jax.device_get(hidden))
    for row, source in enumerate(sources()):
        source = source[source >= 0]
        want = numpy_models.encode(params, model.config, source)
        assert np.abs(encoded[row, : len(source)] - want).max() < NEAR
        wanted: dict[str, np.ndarray] = {}
        numpy_models.decode(params, model.config, want, tokens[row], wanted)
        assert wanted.keys() == set(model.extend_layers)
        for name, want in wanted.items():
            got = np.concatenate([hidden[name][row] for hidden in chunks])
            assert np.abs(got - want).max() < NEAR


def test_an_unknown_hidden_state_is_refused_with_the_known_ones() -> None:
    model, params = v1_1()
    with pytest.raises(ValueError, match="'decoder/layers_7'; known are encoder, decoder/layers_0"):
        model.start(params, jax.device_put(sources()), 8, layers=("decoder/layers_7",))
    state = start(model, params, sources(), 8)
    with pytest.raises(ValueError, match="'decoder/layers_7'; known are encoder, decoder/layers_0"):
        model.extend(params, state, Chunk(jnp.zeros((3, 1), int)), layers=("decoder/layers_7",))
