"""The read bandwidth of the present device, measured."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.backends.cpu import kernels

READS = 8  # In a dispatch, because a dispatch may take as long as one read.


def elapsed(run: Callable[[], Any]) -> float:
    """The seconds of a call that returns arrays."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def seconds(run: Callable[[], Any], rounds: int = 9) -> float:
    """The median time of a call that returns arrays, after one call that compiles."""
    jax.block_until_ready(run())
    return statistics.median(elapsed(run) for _ in range(rounds))


def read_bandwidth(size: int = 2**29) -> float:
    """Bytes a second at which the device sums `size` bytes: many times a processor's caches."""
    values = jnp.ones(size // 4, jnp.float32)
    if jax.default_backend() == "cpu" and kernels.native():
        return size / seconds(lambda: kernels.total(values))
    return READS * size / seconds(lambda: _totals(values))


@jax.jit
def _totals(values: Array) -> Array:
    """Sums all values `READS` times; each sum depends on the last one, so that none is dropped."""
    return lax.fori_loop(0, READS, lambda _, sum_: (values + 1e-30 * sum_).sum(), 0.0)
