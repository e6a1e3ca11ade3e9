"""What the present device does at best, measured: how fast it reads, what an operation costs."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.models import kernels

STREAMED = 2**29
"""Bytes of a streaming read: many times what a processor's caches hold."""

ROUNDS = 9
READS = 8
"""In a dispatch, where one read takes no longer than that does."""

CHAIN, REPEATS = 16, 64
"""Operations in the body of a timed loop, and how often it runs."""


def seconds(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median time of a call whose result is arrays, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read_bandwidth(size: int = STREAMED) -> float:
    """Bytes a second at which a device adds up an array of so many bytes that it streams past."""
    values = jnp.ones(size // 4, jnp.float32)
    if jax.default_backend() == "cpu" and kernels.native():
        return size / seconds(lambda: kernels.total(values))
    return READS * size / seconds(lambda: _totals(values))


@jax.jit
def _totals(values: Array) -> Array:
    """Adds all up `READS` times in one dispatch, each time a little more than the last sum."""
    return lax.fori_loop(0, READS, lambda _, sum_: (values + 1e-30 * sum_).sum(), 0.0)


def operation_seconds() -> float:
    """What one operation costs that does next to nothing, a product of 8 by 8 numbers, in a loop.

    Each one waits for the one before, as those of a decoding step do.
    """
    x, kernel = jnp.ones((8, 8)), jnp.eye(8)
    return seconds(lambda: _chain(x, kernel)) / (CHAIN * REPEATS)


@jax.jit
def _chain(x: Array, kernel: Array) -> Array:
    def body(_: Array, x: Array) -> Array:
        for _turn in range(CHAIN):
            x = jnp.matmul(x, kernel)
        return x

    return lax.fori_loop(0, REPEATS, body, x)
