"""Decoding with parameters laid out for a TPU, on any device: the tokens of stored parameters.

That logits are right is tested with the models (`tests.layouts`), and in `tests/tpu` what the TPU's
compiler makes of the programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends import Attending, Projection, Weight, Xla, for_decoding, tpu
from speculative.backends.tpu import ROWS, Tpu, TpuDraft, _side_by_side, lay_out
from speculative.decoding import Decoding, Params
from speculative.decoding.loop import Models, begin, generate, stream
from speculative.decoding.queue import put_row
from speculative.drafts import TransformerDraft
from speculative.models.interface import Chunk
from speculative.sampling import Sampling
from tests import saved, tiny

DRAFTS = {
    "draft": (tiny.DRAFT, lambda: saved.random(tiny.DRAFT.config, 1)),
    "reader": (tiny.READER, lambda: saved.random(tiny.READER.config, 2)),
}


def settings(gamma: int, temperature: float, max_length: int) -> Decoding:
    return Decoding(tiny.VOCABULARY, Sampling(temperature), gamma, max_length, eos_ids=())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gamma", "temperature", "batch", "max_length"),
    [("draft", 4, 1.0, 1, 130), ("draft", 0, 0.0, 3, 20), ("reader", 4, 0.0, 3, 20)],
)
def test_tokens_are_those_of_stored_parameters(
    name: str, gamma: int, temperature: float, batch: int, max_length: int
) -> None:
    """With 130 tokens the caches grow once."""
    model, make = DRAFTS[name]
    draft = TransformerDraft(model, model.config.reads.source_dim > 0)
    config, inputs = settings(gamma, temperature, max_length), jax.device_put(tiny.sources(batch))
    assert len(config.cache_lengths()) == 1 + (max_length == 130)
    draws = config.draws(5, np.arange(batch))
    stored = Params(tiny.stored_params(), make())
    laid_out = Params(lay_out(stored.target, draft=False), lay_out(stored.draft, draft=True))
    want = generate(tiny.TARGET, draft, stored, inputs, draws, config)
    got = generate(tiny.TARGET, draft, laid_out, inputs, draws, config)
    for left, right in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(left, right)
    if batch > 1:
        return
    steps = list(stream(tiny.TARGET, draft, laid_out, inputs, draws, config))
    streamed = np.concatenate([step.tokens[0, : step.count[0]] for step in steps])
    np.testing.assert_array_equal(streamed, want.tokens[0, : want.lengths[0]])


def test_a_row_of_a_batch_is_replaced() -> None:
    """The drafts' caches have rows and heads in other places than the targets'."""
    config, draft = settings(3, 0.0, 20), TransformerDraft(tiny.DRAFT)
    params = Params(
        lay_out(tiny.stored_params(), draft=False),
        lay_out(saved.random(tiny.DRAFT.config, 1), draft=True),
    )
    models, sources = Models(tiny.TARGET, draft), jax.device_put(tiny.sources(3))
    whole = begin(models, params, sources, config, config.capacity)
    one = begin(models, params, sources[1:2], config, config.capacity)
    want = jax.tree.map(np.asarray, jax.tree.leaves(whole))
    draws = config.draws(0, np.arange(3))
    put, _ = put_row(whole, draws, 1, one, draws[1:2])
    for left, right in zip(jax.tree.leaves(put), want, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.mark.parametrize("keys", [9, 150])
@pytest.mark.parametrize("backend", [Tpu(), TpuDraft()])
@pytest.mark.parametrize(
    ("heads", "size", "batch", "length"),
    [(4, 64, 1, 1), (4, 64, 9, 3), (4, 64, 2, 140), (3, 64, 2, 3), (2, 128, 2, 3)],
)
def test_attention_of_groups_of_heads(
    backend: Tpu, heads: int, size: int, batch: int, length: int, keys: int
) -> None:
    rng = np.random.default_rng(length)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, source = normal(batch, length, heads, size), normal(batch, keys, 8) / 3
    kernels = [Projection(Weight(normal(8, heads * size)), (heads * size,)) for _ in range(2)]
    spec = Attending(normal(batch, heads, 1, keys), 0.1, soft_cap=2.0)
    k, v = Xla().of_source(source, kernels, heads)
    want = Xla().attention(q, k, v, spec)
    k, v = backend.of_source(source, kernels, heads)
    np.testing.assert_allclose(backend.attention(q, k, v, spec), want, atol=1e-5)
    # A row that began alone joins a batch.
    assert backend.of_source(source[:1], kernels, heads)[0].shape[1:] == k.shape[1:]
    # Caches have the same groups as the keys that enter them.
    one = backend.by_head(jnp.zeros((batch, length, heads * size)), heads)
    assert one.shape == backend.cache_shape(batch, heads, length, size)
    k, v = (backend.by_head(_side_by_side(x), heads) for x in (k, v))
    np.testing.assert_allclose(backend.attention(q, k, v, spec), want, atol=1e-5)


@pytest.mark.parametrize("backend", [Tpu(), TpuDraft()], ids=type)
def test_many_keys_are_attended_to_by_some_queries_at_a_time(
    backend: Tpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block is partly padding, and the bias differs from query to query."""
    rng = np.random.default_rng(6)
    query = rng.standard_normal((2, 37, 8, 16)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, 4, 50, 16)).astype(np.float32)
    seen = np.arange(50) <= np.arange(37)[:, None] + 13
    bias = np.where(seen, rng.standard_normal((2, 1, 37, 50)), -1e10).astype(np.float32)
    q, k, v = map(jnp.asarray, (query, keys, values))
    monkeypatch.setattr(tpu, "QUERIES", 16)
    monkeypatch.setattr(tpu, "SCORES", 4 * 2 * 8 * 50 * 8)
    assert backend.at_a_time(q, k) == 8
    assert backend.at_a_time(q[:, :16], k[:, :, :16]) == 16
    assert backend.at_a_time(q[:1], k) == 16
    k, v = (backend.by_head(x.swapaxes(1, 2).reshape(2, 50, -1), 4) for x in (k, v))
    found = jax.jit(backend.attention)(q, k, v, Attending(jnp.asarray(bias), 0.3))
    of_query = np.repeat(np.arange(4), 2)
    scores = 0.3 * np.einsum("blnh,bnkh->bnlk", query.astype(np.float64), keys[:, of_query]) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("bnlk,bnkh->blnh", weights, values[:, of_query])
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_two_heads_of_64_lie_side_by_side() -> None:
    shapes = {(64, 64): (64 // 2, 128), (3, 64): (3, 64), (128, 128): (128, 128), (4, 32): (1, 128)}
    for (heads, size), (groups, width) in shapes.items():
        assert Tpu().cache_shape(2, heads, 16, size) == (2, groups, 16, width)
        assert TpuDraft().cache_shape(2, heads, 16, size) == (2, 1, 16, heads * size)


def test_chunks_fill_tiles() -> None:
    widths = {(1, 1): 8, (1, 8): 8, (1, 9): 16, (2, 1): 4, (3, 1): 8, (4, 3): 4, (8, 1): 1}
    assert {given: Tpu().width(*given) for given in widths} == widths
    assert all(batch * width % ROWS == 0 for (batch, _), width in widths.items())


def test_a_targets_kernels_are_those_given_and_a_drafts_are_fused() -> None:
    params = tiny.stored_params()
    stored = {id(leaf) for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    target, draft = (for_decoding(params, draft, "tpu") for draft in (False, True))
    assert {id(leaf) for leaf in jax.tree.leaves(target) if leaf.ndim > 1} == stored
    layer = draft.prepacked["decoder"]["layers_0"]
    fused = layer["self_attention"]["query_key_value"]["kernel"]
    names = ("query", "key", "value")
    kernels = [params["decoder"]["layers_0"]["self_attention"][name]["kernel"] for name in names]
    np.testing.assert_array_equal(fused.values, np.concatenate(kernels, axis=1))
    assert target.backend != draft.backend


@pytest.mark.parametrize("draft", [False, True])
def test_logits_do_not_depend_on_a_chunks_other_positions(draft: bool) -> None:
    """A verify pass and autoregressive steps have one width, so they agree to the last bit."""
    params, source = lay_out(tiny.stored_params(), draft), jax.device_put(tiny.sources(1))
    tokens = jnp.asarray(np.random.default_rng(4).integers(2, tiny.VOCABULARY, (1, 8)), jnp.int32)
    extend = jax.jit(tiny.TARGET.extend)
    state = jax.jit(tiny.TARGET.start, static_argnums=2)(params, source, 32).state
    whole, _, _ = extend(params, state, Chunk(tokens))
    for position in range(8):
        one, state, _ = extend(params, state, Chunk(tokens[:, position : position + 1]))
        np.testing.assert_array_equal(one[:, 0], whole[:, position])
