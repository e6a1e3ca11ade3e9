"""Weights laid out for decoding on a TPU, and what computes with them.

The rest is left to XLA: what is here keeps it from layouts and products that cost more than a step
may. `speculative compile` shows what its compiler makes of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.backends.prepacked import FUSED, Prepacked, split
from speculative.backends.xla import Weight, Xla, precision
from speculative.types import PyTree

ROWS = 8
"""Rows of the smallest tile of a TPU's registers: a product of fewer takes no less time."""


@dataclasses.dataclass(frozen=True)
class Tpu(Xla):
    """Products of chunks that fill the rows of a tile: for models bound by reading weights."""

    def width(self, batch, length) -> int:
        """The least number of positions that fills whole tiles.

        XLA takes a product with one row for one with a vector, on the vector unit, which takes 3 to
        7 times as long as reading the kernel; and it changes one-row layouts to others and back.
        """
        return next(width for width in range(length, length + ROWS) if batch * width % ROWS == 0)

    def product(self, x, projection, norm=None, activation="linear", out_dtype=None) -> Array:
        """See `Xla`."""
        # XLA would merge projections with their split into heads, and for that copy the kernel into
        # another layout: T5 v1.1 XXL would copy all kernels of attention at every streamed step,
        # and before every generation. And it would merge the two products of a feed-forward layer
        # without gate. Those of T5 11B do not fit the memory on the chip, and take 1.4 times what
        # reading them does.
        return lax.optimization_barrier(super().product(x, projection, norm, activation, out_dtype))


@dataclasses.dataclass(frozen=True)
class TpuDraft(Tpu):
    """For models bound by the number of operations: heads are never taken apart.

    Keys and values are [B, 1, T, N * H]. All heads' scores are one product, of a query for each
    head that is 0 outside it. That is N times the arithmetic, of which there is little, and half of
    the operations: nothing is transposed.
    """

    def cache_shape(self, batch, heads, length, size) -> tuple[int, ...]:
        """[B, 1, T, N * H]."""
        return batch, 1, length, heads * size

    def attention(self, q, k, v, spec) -> Array:
        """See `Xla`, with keys and values [B, 1, T, N * H]."""
        batch, length, heads, size = q.shape
        k, v = k[:, 0], v[:, 0]
        if length > 2 * ROWS:  # A whole text, whose arithmetic counts.
            k, v = (Xla.by_head(self, x, heads) for x in (k, v))
            return super().attention(q, k, v, spec)
        q = q.reshape(batch, length, -1)
        of_head = np.arange(heads * size) // size == np.arange(heads)[:, None]
        own = jnp.asarray(of_head, q.dtype)[None, :, None, :]
        spread, exact = (q * spec.scale)[:, None] * own, precision(q)  # [B, N, L, N * H]
        scores = lax.dot_general(spread, k, (((3,), (2,)), ((0,), (0,))), exact, jnp.float32)
        weights = jax.nn.softmax(scores + spec.of_queries(0, length), axis=-1).astype(q.dtype)
        mixed = lax.dot_general(weights, v, (((3,), (1,)), ((0,), (0,))), exact)
        return (mixed * own).sum(axis=1).reshape(batch, length, heads, size)

    def product(self, x, projection, norm=None, activation="linear", out_dtype=None) -> Array:
        """See `Xla`; small products may be merged, but not those of a layer without gate."""
        y = Xla.product(self, x, projection, norm, activation, out_dtype)
        return y if activation == "linear" else lax.optimization_barrier(y)

    def by_head(self, x, heads) -> Array:
        """As they are: [B, 1, L, N * H]."""
        return x[:, None]


def lay_out(params: PyTree, draft: bool) -> Prepacked:
    """Parameters for decoding on a TPU: what `backends.prepack` is on CPU.

    A draft's kernels that share their input become one. A large target would be slower so, and
    its kernels are those given, not copies.
    """

    def kernel(_: tuple[str, ...], *group: Array) -> Weight:
        return Weight(group[0] if len(group) == 1 else jnp.concatenate(group, axis=1))

    backend, groups = (TpuDraft(), FUSED) if draft else (Tpu(), ())
    return split(params, backend, kernel, groups, tied=False)
