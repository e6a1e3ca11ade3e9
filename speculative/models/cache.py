"""The explicit states of decoders: caches, per-row lengths, encoded source."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.types import PyTree, Rows

T = TypeVar("T")


@struct.dataclass
class DecoderState:
    """What a decoder remembers between chunks.

    Heads come before positions, so that every attention product is a plain batched one and
    nothing of the cache's size is ever transposed; rows and heads are one axis, so that the
    products read the very array that the state keeps, with no copy between.

    Attributes:
        lengths: [B] tokens that each row's cache holds; entries at or beyond it are stale
            and lie behind the mask.
        keys: per layer [B * N, T, H], self-attention keys.
        values: per layer [B * N, T, H].
        cross_keys: per layer [B * N, S, H], projected once by `start`.
        cross_values: per layer [B * N, S, H].
        source_bias: [B, 1, 1, S] float32, 0 at tokens and -1e10 at padding.
        encoded: [B, S, D] the encoder's output, for drafts that read it.
    """

    lengths: Rows
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    cross_keys: tuple[Array, ...]
    cross_values: tuple[Array, ...]
    source_bias: Array
    encoded: Array


@struct.dataclass
class PromptedState:
    """What a decoder-only model remembers between chunks.

    Attributes:
        lengths: [B] tokens that each row's cache holds beyond its prompt; see `DecoderState`.
        prompt: [B] tokens of the prompt that it holds: all but the last, which is fed first.
        keys: per layer [B * N, T, H].
        values: per layer [B * N, T, H].
    """

    lengths: Rows
    prompt: Rows
    keys: tuple[Array, ...]
    values: tuple[Array, ...]


State = TypeVar("State", DecoderState, PromptedState)


def rewind(state: State, lengths: Rows) -> State:
    """Forgets everything beyond `lengths` [B]; nothing is copied or cleared."""
    return dataclasses.replace(state, lengths=lengths)


def write_rows(buffer: Array, chunk: Array, starts: Rows, axis: int) -> Array:
    """Writes `chunk` into `buffer` from `starts[b]` on along `axis`.

    Both are [B, ...], or [B * N, ...] with N entries for each of `starts` [B]. A start too near
    the end would be shifted back silently, as `dynamic_update_slice` does; callers size their
    buffers so that it never is.
    """
    chunk = chunk.astype(buffer.dtype)
    if starts.shape[0] == 1:
        # In place and one operation; the general form below becomes a scatter.
        return lax.dynamic_update_slice_in_dim(buffer, chunk, starts[0], axis)
    starts = jnp.repeat(starts, buffer.shape[0] // starts.shape[0])
    return jax.vmap(lambda b, c, s: lax.dynamic_update_slice_in_dim(b, c, s, axis - 1))(
        buffer, chunk, starts
    )


def read_rows(buffer: Array, starts: Rows, size: int) -> Array:
    """Reads `size` entries of `buffer` [B, T, ...] from `starts[b]` on: [B, size, ...]."""
    if buffer.shape[0] == 1:
        return lax.dynamic_slice_in_dim(buffer, starts[0], size, axis=1)
    return jax.vmap(lambda b, s: lax.dynamic_slice_in_dim(b, s, size, axis=0))(buffer, starts)


def grow(state: T, larger: PyTree) -> T:
    """Pads every leaf of a state, at the end, to the shapes of `larger` (arrays or structs)."""
    return jax.tree.map(
        lambda x, y: (
            x
            if x.shape == y.shape
            else jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, y.shape, strict=True)])
        ),
        state,
        larger,
    )
