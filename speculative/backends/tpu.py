"""Weights laid out for decoding on a TPU, and what computes with them.

The rest is left to XLA: what is here keeps it from layouts and products that cost more than a step
may. `speculative compile` shows what its compiler makes of it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from speculative.backends.prepacked import FUSED, split
from speculative.backends.xla import Xla, precision, split_heads
from speculative.types import PyTree

READ_AHEAD: dict[str, str | bool] = {
    "xla_tpu_msa_tensor_overrides": "overrides { hlo_operand_filter { "
    'instruction_name_regex: "while.*" size_gte: 1000000 } keep_in_default_memory { } }',
    "xla_max_cross_program_prefetches": "0",
}
"""Options of the compiler for programs with a draft: no kernel stays on the chip through a loop.

XLA fills most of a v4's 128 MiB on the chip with kernels that stay there from step to step, and
then has no room to read the others ahead. A guess of T5 v1.1 large beside XXL would take 1.9 times
as long, of small 1.15 times, and XXL's verification 1.04 times. Streamed steps would begin with
reading a large kernel that is used after the draft's loop only.
"""

ROWS = 8
"""Rows of the smallest tile of a TPU's registers: a product of fewer takes no less time."""


class Kernel(NamedTuple):
    """A target's kernel [in, out]; None where logits are tied to the embedding."""

    array: Array | None


class DraftKernel(NamedTuple):
    """The same of a draft, which may be several kernels side by side."""

    array: Array | None


class Tpu(Xla):
    """Products of chunks that fill the rows of a tile: for models bound by reading weights."""

    def width(self, batch, length) -> int:
        """The least number of positions that fills whole tiles.

        XLA takes a product with one row for one with a vector, on the vector unit, which takes 3 to
        7 times as long as reading the kernel; and it changes one-row layouts to others and back.
        """
        return next(width for width in range(length, length + ROWS) if batch * width % ROWS == 0)

    def product(self, kernel: Kernel | DraftKernel, *given, **after) -> Array:
        """As of `Xla`."""
        y = super().product(kernel.array, *given, **after)
        # XLA would merge the two products of a feed-forward layer without gate. Those of T5 11B do
        # not fit the memory on the chip, and take 1.4 times what reading them does.
        return _apart(y) if "activation" in after else y

    def taken_apart(self, x, heads) -> Array:
        """As of `Xla`."""
        return super().taken_apart(_apart(x), heads)

    def attend(self, query, keys, values, bias, heads, scale) -> Array:
        """As of `Xla`."""
        return super().attend(_apart(query), keys, values, bias, heads, scale)


def _apart(x: Array) -> Array:
    """A projection that is not to be merged with its split into heads.

    XLA would merge them, and for that copy the kernel into another layout: T5 v1.1 XXL would copy
    all kernels of attention at every streamed step, and before every generation.
    """
    return lax.optimization_barrier(x)


class TpuDraft(Tpu):
    """For models bound by the number of operations: heads are never taken apart.

    Keys and values are [B, 1, T, N * H]. All heads' scores are one product, of a query for each
    head that is 0 outside it. That is N times the arithmetic, of which there is little, and half of
    the operations: nothing is transposed.
    """

    def cache_shape(self, batch, heads, length, size) -> tuple[int, ...]:
        """[B, 1, T, N * H]."""
        return batch, 1, length, heads * size

    def attend(self, query, keys, values, bias, heads, scale) -> Array:
        """As of `Xla`, with keys and values [B, 1, K, N * H]."""
        keys, values = keys[:, 0], values[:, 0]
        if query.shape[1] > 2 * ROWS:  # A whole text, whose arithmetic counts.
            keys, values = split_heads(keys, heads), split_heads(values, heads)
            return super().attend(query, keys, values, bias, heads, scale)
        width = query.shape[-1]
        of_head = np.arange(width) // (width // heads) == np.arange(heads)[:, None]
        own = jnp.asarray(of_head, query.dtype)[None, :, None, :]
        spread, exact = (query * scale)[:, None] * own, precision(query)  # [B, N, L, N * H]
        scores = lax.dot_general(spread, keys, (((3,), (2,)), ((0,), (0,))), exact, jnp.float32)
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(query.dtype)
        mixed = lax.dot_general(weights, values, (((3,), (1,)), ((0,), (0,))), exact)
        return (mixed * own).sum(axis=1)

    def taken_apart(self, x, heads) -> Array:
        """As they are: [B, 1, L, N * H]."""
        return x[:, None]


def lay_out(params: PyTree, draft: bool) -> PyTree:
    """Parameters for decoding on a TPU: what `backends.prepack` is on CPU.

    A draft's kernels that share their input become one. A large target would be slower so, and
    its kernels are those given, not copies.
    """
    kind = DraftKernel if draft else Kernel

    def kernel(_: tuple[str, ...], *group: Any) -> Kernel | DraftKernel:
        return kind(group[0] if len(group) == 1 else jnp.concatenate(group, axis=1))

    return split(params, kernel, FUSED if draft else (), lambda embedding: kind(None))


@functools.cache
def compiler_options(device: Any = None) -> tuple[tuple[str, str | bool], ...]:
    """`READ_AHEAD` if the compiler of the device knows it: libtpu 0.0.52 does, 0.0.42 does not."""
    on = SingleDeviceSharding(device or jax.devices()[0])
    tile = jax.ShapeDtypeStruct((ROWS, 128), np.float32, sharding=on)
    try:
        jax.jit(jnp.negative).lower(tile).compile(READ_AHEAD)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return ()
    return tuple(READ_AHEAD.items())
