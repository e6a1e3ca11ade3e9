"""The parts of a model that have a definition of their own."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.models import SIZES
from speculative.models.layers import FEW, look_up, relative_buckets
from tests import numpy_t5

DISTANCES = np.arange(-300, 301)
PLAIN = SIZES["t5_1_1_base"]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 64), (64, 256)])
def test_relative_buckets_are_the_definition(
    bidirectional: bool, buckets: int, furthest: int
) -> None:
    config = PLAIN.replace(num_buckets=buckets, max_distance=furthest)
    got = relative_buckets(DISTANCES, bidirectional, config)
    want = [numpy_t5.bucket(int(d), bidirectional, buckets, furthest) for d in DISTANCES]
    np.testing.assert_array_equal(got, want)


def test_relative_buckets_of_t5_by_hand() -> None:
    """32 buckets up to distance 128, as T5 has them: the first distance of each bucket."""
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    behind = relative_buckets(-np.array(first), True, PLAIN)
    np.testing.assert_array_equal(behind, np.arange(16))
    np.testing.assert_array_equal(
        relative_buckets(np.array(first[1:]), True, PLAIN), np.arange(17, 32)
    )
    np.testing.assert_array_equal(
        relative_buckets(-np.array(first[1:]) + 1, True, PLAIN), np.arange(15)
    )
    first = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    np.testing.assert_array_equal(relative_buckets(-np.array(first), False, PLAIN), np.arange(32))
    np.testing.assert_array_equal(
        relative_buckets(-np.array(first[1:]) + 1, False, PLAIN), np.arange(31)
    )
    assert (relative_buckets(np.arange(300), False, PLAIN) == 0).all()


@pytest.mark.parametrize("positions", [1, FEW, FEW + 1])
def test_rows_are_looked_up(positions: int) -> None:
    random = np.random.default_rng(positions)
    table, index = random.normal(size=(100, 6)), random.integers(0, 100, (1, positions))
    table = table.astype(np.float32)
    found = jax.jit(embedded)(table, index)
    np.testing.assert_array_equal(found, table[index])


def test_no_thread_wakes_for_a_few_rows() -> None:
    """XLA on CPU would read one of its gathers with several threads, as a control shows."""
    table, few, many = jnp.zeros((32128, 256)), jnp.zeros((1, 8), int), jnp.zeros((1, 64), int)
    shared = r'"outer_dimension_partitions":\["'
    if not re.search(shared, jax.jit(embedded).lower(table, many).compile().as_text() or ""):
        pytest.skip("this XLA has one thread, or reads gathers with one")
    assert not re.search(shared, jax.jit(embedded).lower(table, few).compile().as_text() or "")


def embedded(table: jax.Array, index: jax.Array) -> jax.Array:
    embedder = nn.Embed(table.shape[0], table.shape[1])
    rows: Any = embedder.apply({"params": {"embedding": table}}, index, method=look_up)
    return rows
