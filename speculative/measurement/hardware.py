"""The read bandwidth of the present device, measured."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.backends.cpu import kernels

READS = 8  # Reads per dispatch, because a dispatch may take as long as one read.


def elapsed(run: Callable[[], Any]) -> float:
    """The seconds of a call that returns arrays."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def read_bandwidth(size: int = 2**29) -> float:
    """Bytes per second at which the device sums `size` bytes, many times a processor's caches."""
    values = jnp.ones(size // 4, jnp.float32)
    native = jax.default_backend() == "cpu" and kernels.native()
    read = functools.partial(kernels.total if native else _totals, values)
    _, *seconds = (elapsed(read) for _ in range(10))  # The first call compiles.
    return (1 if native else READS) * size / statistics.median(seconds)


@jax.jit
def _totals(values: Array) -> Array:
    """Sums all values `READS` times; each sum depends on the last one, so that none is dropped."""
    return lax.fori_loop(0, READS, lambda _, sum_: (values + 1e-30 * sum_).sum(), 0.0)
