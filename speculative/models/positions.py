"""Positions and masks: the biases that attention adds to its scores."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.models.config import Config
from speculative.ragged import sheared
from speculative.types import Rows

# Added to the score of a position that must not be seen; finite, so padding stays finite.
MASKED = -1e10


def masked(seen: Array | np.ndarray) -> Array:
    """The bias on scores that hides all positions but those `seen`."""
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)


def beside(first: Array, second: Array) -> Array:
    """Biases side by side along the last axis, after both are repeated along the others."""
    shape = jnp.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    both = (jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (first, second))
    return jnp.concatenate([*both], axis=-1)


def same_segment(queries: Array, keys: Array, also: Array | bool = True) -> Array:
    """The mask [B, 1, Q, K] that keeps attention between equal segment numbers."""
    return masked((queries[:, :, None] == keys[:, None, :]) & also)[:, None]


def shifted(x: Array, segments: Array) -> Array:
    """Shifts x [B, L, ...] by one position, with 0 where a text begins."""
    same = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    before = jnp.roll(x, 1, axis=1)
    return jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), before, 0)


def positions_in(segments: Array) -> Array:
    """Positions [B, L] in packed texts, each counted from the beginning of its own text."""
    index = jnp.arange(segments.shape[1])
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)


def relative_buckets(distance: np.ndarray, bidirectional: bool, config: Config) -> np.ndarray:
    """T5's bucket of each distance, key position minus query position (Raffel et al., 2.1).

    Half the buckets are exact, the others grow logarithmically up to `max_distance`. In float64,
    unlike T5's float32, the logarithms of a few distances would cross a boundary.
    """
    buckets = config.num_buckets // (2 if bidirectional else 1)
    offset = (distance > 0) * buckets if bidirectional else 0
    away = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (ratio / np.log(config.max_distance / exact) * (buckets - exact)).astype(np.int32)
    return offset + np.where(away < exact, away, np.minimum(far, buckets - 1))


def causal_bias(by_distance: Array, starts: Array, length: int) -> Array:
    """Bias and causal mask [B, N or 1, L, T] for L queries from positions starts [B] on.

    `by_distance` [N or 1, T], float32, has the bias for keys T - 1, ..., 0 positions back.
    """
    # Every row of the bias is a window on one table over distances, descending from T - 1 to 0
    # and then masked. Queries that only pad a chunk may lie beyond the cache; their scores do not
    # matter.
    cache = by_distance.shape[1]
    table = jnp.pad(by_distance, ((0, 0), (length, cache)), constant_values=MASKED)
    size = cache + length

    def window(start: Array) -> Array:
        return sheared(lax.dynamic_slice_in_dim(table, cache - start, size, axis=1), length)

    return jax.vmap(window)(starts) if starts.shape[0] > 1 else window(starts[0])[None]


def branching_bias(
    by_distance: Array, text: Rows, behind: Array, positions: Array, mask: Array
) -> Array:
    """`causal_bias` for queries in branches (`interface.Chunk`) after texts of lengths `text` [B].

    `behind` [B or 1, Q] has the positions of the queries; `positions` [B or 1, M] those of all
    tokens of the branches, in their order in the cache from `text` on; `mask` is [B or 1, Q, M].
    """
    batch, cache = text.shape[0], by_distance.shape[1]
    index = jnp.arange(cache) - text[:, None]
    entry = index[..., None] == jnp.arange(positions.shape[1])  # [B, T, M]
    key = jnp.where(index < 0, index, (entry * positions[:, None]).sum(axis=-1))
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
    of_branch = jnp.einsum("bqm,btm->bqt", mask * 1.0, entry * 1.0) > 0.5
    distance = jnp.broadcast_to(behind, (batch, behind.shape[1]))[..., None] - key[:, None]
    bias = by_distance[:, cache - 1 - jnp.clip(distance, 0, cache - 1)].swapaxes(0, 1)
    return bias + masked(of_branch | (index < 0)[:, None])[:, None]
