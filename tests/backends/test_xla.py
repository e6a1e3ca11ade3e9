"""What XLA computes on CPU beside products and attention."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.backends import look_up
from speculative.backends.xla import FEW, Projection, Weight, Xla


@pytest.mark.parametrize("positions", [1, FEW, FEW + 1])
def test_rows_are_looked_up(positions: int) -> None:
    random = np.random.default_rng(positions)
    table, index = random.normal(size=(100, 6)), random.integers(0, 100, (1, positions))
    table = table.astype(np.float32)
    found = jax.jit(look_up)(table, index)
    np.testing.assert_array_equal(found, table[index])


def test_no_thread_wakes_for_a_few_rows() -> None:
    """XLA on CPU would read one of its gathers with several threads, as a control shows."""
    table, few, many = jnp.zeros((32128, 256)), jnp.zeros((1, 8), int), jnp.zeros((1, 64), int)
    shared = r'"outer_dimension_partitions":\["'
    if not re.search(shared, jax.jit(look_up).lower(table, many).compile().as_text() or ""):
        pytest.skip("this XLA has one thread, or reads gathers with one")
    assert not re.search(shared, jax.jit(look_up).lower(table, few).compile().as_text() or "")


@pytest.mark.parametrize("told", [None, "tensorfloat32"])
def test_float32_is_multiplied_in_full_unless_jax_was_told_otherwise(told: str | None) -> None:
    x, kernel = jnp.ones((2, 8)), jnp.ones((8, 4))
    product = jax.jit(lambda kernel, x: Xla().product(x, Projection(Weight(kernel), (4,))))
    with jax.default_matmul_precision(told) if told else contextlib.nullcontext():
        text = product.lower(kernel, x).as_text()
    assert f"precision = [{'HIGH' if told else 'HIGHEST'}, " in text
