"""Writes, reads and resizes buffers of a batch whose rows advance at different speeds."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.types import PyTree, Rows

T = TypeVar("T")


def write_rows(buffer: Array, chunk: Array, starts: Rows, axis: int) -> Array:
    """Writes `chunk` [B, ...] into `buffer` [B, ...] from `starts[b]` on along `axis`.

    A start too near the end would be shifted back silently; callers size their buffers so that it
    never is.
    """
    chunk = chunk.astype(buffer.dtype)
    if starts.shape[0] == 1:
        # This is one operation, in place; the general form below becomes a scatter.
        return lax.dynamic_update_slice_in_dim(buffer, chunk, starts[0], axis)
    return jax.vmap(lambda b, c, s: lax.dynamic_update_slice_in_dim(b, c, s, axis - 1))(
        buffer, chunk, starts
    )


def select_rows(buffer: Array, chunk: Array, starts: Rows, axis: int) -> Array:
    """Like `write_rows`, but in one pass over the buffer, without a scatter."""
    chunk, shape = chunk.astype(buffer.dtype), [1] * buffer.ndim
    shape[0], shape[axis] = len(starts), buffer.shape[axis]
    behind = (jnp.arange(buffer.shape[axis]) - starts[:, None]).reshape(shape)
    for i in range(chunk.shape[axis]):
        buffer = jnp.where(behind == i, lax.slice_in_dim(chunk, i, i + 1, axis=axis), buffer)
    return buffer


def read_rows(buffer: Array, starts: Rows, size: int) -> Array:
    """Reads `size` entries of `buffer` [B, T, ...] from `starts[b]` on: [B, size, ...]."""
    if buffer.shape[0] == 1:
        return lax.dynamic_slice_in_dim(buffer, starts[0], size, axis=1)
    return jax.vmap(lambda b, s: lax.dynamic_slice_in_dim(b, s, size, axis=0))(buffer, starts)


def move_rows(buffer: Array, places: Array, starts: Rows, axis: int) -> Array:
    """Copies entries of `buffer` [B, ...] along `axis`, from places [B, K] to `starts[b]` on."""
    shape = [1] * buffer.ndim
    shape[0], shape[axis] = places.shape
    moved = jnp.take_along_axis(buffer, places.reshape(shape), axis=axis)
    return write_rows(buffer, moved, starts, axis)


def sheared(seen: Array, rows: int) -> Array:
    """Windows on seen [..., rows + K], each one entry left of the one before: [..., rows, K].

    The last window begins at the first entry. Laying copies of `seen` out in rows that are one
    entry shorter shifts them in a single operation.
    """
    size = seen.shape[-1]
    copies = jnp.tile(seen, rows)[..., : rows * (size - 1)]
    return copies.reshape(*seen.shape[:-1], rows, size - 1)[..., rows - 1 :]


def power_of_two(rows: int) -> int:
    """The least power of two that is at least `rows`, so that batches need few programs."""
    return 2 ** (rows - 1).bit_length()


def resized(state: T, shapes: PyTree) -> T:
    """Pads or cuts every leaf of a state, at the end, to the shapes of arrays or structs."""

    def fit(x: Array, y: Array) -> Array:
        room = [(0, after - before, 0) for before, after in zip(x.shape, y.shape, strict=True)]
        return x if x.shape == y.shape else lax.pad(x, jnp.zeros((), x.dtype), room)

    return jax.tree.map(fit, state, shapes)
