"""Weights laid out for decoding on a TPU, and the backends that compute with them.

The rest is left to XLA; this module keeps it from layouts and products that cost too much in a
step. `speculative compile` shows the compiler's results.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.backends.prepacked import FUSED, Prepacked, split
from speculative.backends.xla import QUERIES, Projection, Weight, Xla, precision
from speculative.ragged import select_rows
from speculative.types import ROUNDED, PyTree

ROWS = 8
"""Rows of the smallest tile of a TPU's registers: a product of fewer takes as long."""


LANES = 128
"""Numbers side by side in a tile."""

MANY = 128
"""Rows of a product of a group's heads, beyond which the heads are taken apart."""

SCORES = 2**26
"""Most bytes of scores of queries and many keys, so that they can stay on the chip."""


def together(size: int) -> int:
    """The number of heads of a size that fill the lanes of a register."""
    return max(1, LANES // size)


@dataclasses.dataclass(frozen=True)
class Tpu(Xla):
    """The backend for models bound by reading weights: chunks fill the rows of a tile."""

    def width(self, batch, length) -> int:
        """The least number of positions that fills whole tiles.

        XLA treats a product with one row as one with a vector, on the vector unit, which takes 3 to
        7 times as long as reading the kernel; and it changes one-row layouts to others and back.
        """
        return next(width for width in range(length, length + ROWS) if batch * width % ROWS == 0)

    def product(self, x, projection, norm=None, activation="linear", out_dtype=None) -> Array:
        """See `Xla`."""
        # XLA would merge projections with their split into heads, and copy the kernel into another
        # layout for that: at every streamed step without `READ_AHEAD`, and before every generation.
        # It would also merge the two products of a feed-forward layer without a gate. Those of T5
        # 11B do not fit into the chip's memory, and take 1.4 times as long as reading them.
        return lax.optimization_barrier(super().product(x, projection, norm, activation, out_dtype))

    def groups(self, heads: int, size: int) -> int:
        """The number of groups G of neighbouring heads that lie side by side in caches.

        A group fills the lanes of a register, which a single head of 64 would leave half empty.
        """
        each = together(size)
        return heads // each if heads % each == 0 else heads

    def cache_shape(self, batch, heads, length, size) -> tuple[int, ...]:
        """See `Xla.cache_shape`; here it is [B, G, T, K / G * H]."""
        groups = self.groups(heads, size)
        return batch, groups, length, heads // groups * size

    def by_head(self, x, heads) -> Array:
        """Keys or values [B, L, K * H] by group: [B, G, L, K / G * H]."""
        return super().by_head(x, self.groups(heads, x.shape[-1] // heads))

    def of_source(self, x, projections, heads) -> list[Array]:
        """See `Xla`; long sources stay by head, because one row attends to them faster.

        The layout must not depend on the batch, because rows begin alone and then join one.
        """
        if x.shape[1] <= LANES:
            return super().of_source(x, projections, heads)
        return [Xla.by_head(self, self.product(x, each), heads) for each in projections]

    def at_a_time(self, q, k) -> int:
        """See `Xla`; with more than `QUERIES` keys, those whose scores take at most `SCORES`.

        Scores of 512 queries and 2,000 keys would pass through HBM several times, which takes
        longer than all else that reads a prompt.
        """
        batch, length, heads, _ = q.shape
        if max(length, k.shape[2]) <= QUERIES:
            return length
        most = SCORES // (4 * batch * heads * k.shape[2])
        return max(ROWS, 1 << most.bit_length() >> 1)  # A power of 2, to divide a prompt's parts.

    def attention(self, q, k, v, spec) -> Array:
        """See `Xla`, with keys and values [B, G, T, K / G * H].

        All scores of a group are one product, in which each head's query is 0 outside that head.
        That is K / G times the arithmetic, of which there is little.
        """
        batch, length, heads, size = q.shape
        groups, each = k.shape[1], k.shape[3] // size  # Key heads in a group.
        shared = heads // (groups * each)  # Query heads of each key head.
        if each * shared * length > MANY:
            k, v = (Xla.by_head(self, _side_by_side(x), groups * each) for x in (k, v))
            each = 1
        if each == 1:
            return super().attention(q, k, v, spec)
        of_head = np.arange(each * size) // size == np.arange(each)[:, None]
        own = jnp.asarray(of_head, q.dtype)[:, None]  # [K / G, 1, K / G * H]
        by_group = q * spec.scale
        if shared > 1:  # Neighbours in q share a key; here each row covers all keys of a group.
            by_group = by_group.reshape(batch, length, groups, each, shared, size).swapaxes(3, 4)
        by_group = by_group.reshape(batch, length, groups, shared, -1).transpose(0, 2, 3, 1, 4)
        by_group = by_group.reshape(batch, groups, 1, shared * length, -1)
        spread = (by_group * own).reshape(batch, groups, each * shared * length, -1)
        exact = precision(q)
        of_groups = (0, 1), (0, 1)
        scores = lax.dot_general(spread, k, (((3,), (3,)), of_groups), exact, jnp.float32)
        scores = spec.capped(scores.reshape(batch, heads, length, -1)) + spec.of_queries(0, length)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        weights = weights.reshape(batch, groups, each * shared * length, -1)
        mixed = lax.dot_general(weights, v, (((3,), (2,)), of_groups), exact)
        mixed = (mixed.reshape(batch, groups, each, shared * length, -1) * own).sum(axis=2)
        mixed = mixed.reshape(batch, groups, shared, length, -1).transpose(0, 3, 1, 2, 4)
        if shared > 1:
            mixed = mixed.reshape(batch, length, groups, shared, each, size).swapaxes(3, 4)
        return mixed.reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class TpuDraft(Tpu):
    """The backend for models bound by the number of operations: heads are never taken apart.

    Keys and values are [B, 1, T, N * H], and all heads attend in one product. That halves the
    operations, because nothing is transposed.
    """

    def product(self, x, projection, norm=None, activation="linear", out_dtype=None) -> Array:
        """See `Xla`; small products may be merged, but not those of a layer without a gate."""
        y = Xla.product(self, x, projection, norm, activation, out_dtype)
        return y if activation == "linear" else lax.optimization_barrier(y)

    def groups(self, heads, size) -> int:
        """See `Tpu.groups`; there is one."""
        return 1

    def write(self, buffer, chunk, starts) -> Array:
        """See `Xla`; a scatter into such caches is a slow loop over the rows of a batch."""
        if len(starts) == 1:
            return super().write(buffer, chunk, starts)
        return select_rows(buffer, chunk, starts, axis=2)

    def of_source(self, x, projections, heads) -> list[Array]:
        """See `Xla`."""
        return Xla.of_source(self, x, projections, heads)


@dataclasses.dataclass(frozen=True)
class TpuShared(Tpu):
    """The backend for int8 targets that chips share, each with few heads and narrow kernels.

    Here the number of operations counts too: a chip's heads attend in one product, and kernels
    of one input become one, in which each chip's parts lie side by side.
    """

    shards: int = 1  # Chips that share each kernel.

    def groups(self, heads, size) -> int:
        """See `Tpu.groups`; there is one per chip."""
        return self.shards

    def apart(self, y, sizes) -> list[Array]:
        """See `Xla`."""
        of_chips = y.reshape(*y.shape[:-1], self.shards, -1)
        parts = super().apart(of_chips, [size // self.shards for size in sizes])
        return [part.reshape(*y.shape[:-1], -1) for part in parts]

    def add_product(self, residual, x, projection) -> Array:
        """See `Xla`; chips exchange sums in the type of x, before scaling makes them float32."""
        (kernel, scales), bias = projection.weight, projection.bias
        if scales is None or self.rounds:
            return super().add_product(residual, x, projection)
        unscaled = super().product(x, Projection(Weight(kernel), projection.sizes))
        y = (unscaled.astype(jnp.float32) * scales).astype(x.dtype)
        return residual + (y if bias is None else y + bias.astype(x.dtype))


def _side_by_side(x: Array) -> Array:
    """Keys or values [B, G, T, K / G * H] as [B, T, K * H]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def lay_out(params: PyTree, draft: bool, quantize: str = "none", shards: int = 1) -> Prepacked:
    """Lays parameters out for decoding on a TPU, like `backends.prepack` on CPU.

    A draft's kernels that share their input become one. That would slow a large target down, so its
    kernels are used as given, not copied; but if chips share each kernel in `shards` parts, int8
    kernels become one too, and tied logits get their own kernel.
    """
    rounds, in_int8 = quantize == ROUNDED, quantize != "none"
    if shards > 1 and in_int8:
        made, groups = TpuShared(rounds, shards=shards), FUSED
    else:
        fused = draft and shards == 1
        made, groups = (TpuDraft(rounds), FUSED) if fused else (Tpu(rounds), ())
    laid_out = split(params, made, groups, tied=shards > 1, quantize=in_int8, shards=shards)

    def widened(path: tuple[Any, ...], leaf: Array) -> Array:
        # Norms compute in float32; widening a scale would take another operation at each step.
        return leaf.astype(jnp.float32) if path[-1] == jax.tree_util.DictKey("scale") else leaf

    params = jax.tree_util.tree_map_with_path(widened, laid_out.params)
    return dataclasses.replace(laid_out, params=params)
