"""Reading, writing and growing rows, against loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.ragged import move_rows, read_rows, resized, select_rows, write_rows


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("axis", [1, 2])
def test_rows_are_written_and_moved_each_to_its_own_place(batch: int, axis: int) -> None:
    rng = np.random.default_rng(batch)
    shape = [batch, 9, 9, 2]
    buffer = rng.normal(size=shape).astype(np.float32)
    shape[axis] = 4
    chunk = rng.normal(size=shape).astype(np.float32)
    starts, places = (
        np.array([5, 0, 2])[:batch],
        np.array([[6, 0, 8], [8, 8, 1], [2, 4, 3]])[:batch],
    )
    written, moved = buffer.copy(), buffer.copy()
    for row, start in enumerate(starts):
        place: list[Any] = [slice(None)] * 3
        place[axis - 1] = slice(start, start + 4)
        written[row][tuple(place)] = chunk[row]
        place[axis - 1] = slice(start, start + 3)
        moved[row][tuple(place)] = np.take(buffer[row], places[row], axis - 1)
    given = jax.device_put(starts), axis
    got = jax.jit(write_rows, static_argnums=3)(buffer, chunk, *given)
    np.testing.assert_array_equal(got, written)
    got = jax.jit(select_rows, static_argnums=3)(buffer, chunk, *given)
    np.testing.assert_array_equal(got, written)
    got = jax.jit(move_rows, static_argnums=3)(buffer, places, *given)
    np.testing.assert_array_equal(got, moved)


def test_write_rows_keeps_the_buffer_s_type() -> None:
    buffer = jnp.zeros((1, 4, 2), jnp.bfloat16)
    assert write_rows(buffer, jnp.ones((1, 2, 2)), jnp.array([1]), 1).dtype == jnp.bfloat16


@pytest.mark.parametrize("batch", [1, 3])
def test_read_rows_reads_each_row_from_its_start(batch: int) -> None:
    buffer = np.random.default_rng(batch).normal(size=(batch, 9, 2)).astype(np.float32)
    starts = np.array([6, 0, 4])[:batch]
    want = np.stack([buffer[row, begin : begin + 3] for row, begin in enumerate(starts)])
    got = jax.jit(read_rows, static_argnums=2)(buffer, jax.device_put(starts), 3)
    np.testing.assert_array_equal(got, want)


def test_grow_pads_at_the_end_and_only_what_differs() -> None:
    state = {"lengths": jnp.array([2, 1]), "keys": (jnp.ones((2, 3, 4)),)}
    larger = {"lengths": jnp.zeros(2, int), "keys": (jax.ShapeDtypeStruct((2, 3, 6), float),)}
    grown = resized(state, larger)
    np.testing.assert_array_equal(grown["lengths"], [2, 1])
    np.testing.assert_array_equal(grown["keys"][0][..., :4], 1.0)
    np.testing.assert_array_equal(grown["keys"][0][..., 4:], 0.0)
