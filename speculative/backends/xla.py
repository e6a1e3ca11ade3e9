"""Products and attention as XLA computes them, on any device, with weights as they are stored.

Layers call a backend with arrays and their descriptions (`Projection`, `Norm`, `Attending`,
`Cache`); a backend never calls back.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.ragged import sheared, write_rows
from speculative.types import Rows

FEW = 16  # Up to this many rows of a table, XLA on CPU is fastest one row at a time.

TINY = 1e-30  # The least peak of inputs, which may all be 0.

AT_A_TIME = 2**22  # Numbers that the host quantizes together.

QUERIES, BLOCK = 512, 256  # With more than `QUERIES`, attention takes blocks of `BLOCK` queries.

# The functions of `types.ACTIVATIONS`.
ACTIVATE: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
}


class Weight(NamedTuple):
    """A kernel [I, O] of JAX or NumPy, as it is stored or as a backend has laid it out.

    Integers are multiples of `scales`, one per output; floating-point numbers have None.
    """

    values: Any
    scales: Any = None


def quantized(kernel: Any, axis: int = 0) -> Weight:
    """A JAX or NumPy kernel as symmetric int8 with float32 scales [O]; `axis` is the inputs'.

    An output's greatest magnitude is 127 times its scale; an output of zeros has scale 1.
    """
    xp = kernel.__array_namespace__()
    kernel = kernel.astype(np.float32, copy=False)
    scales = abs(kernel).max(axis=axis) / np.float32(127)
    scales = xp.where(scales > 0, scales, xp.ones_like(scales))
    return Weight(xp.rint(kernel / xp.expand_dims(scales, axis)).astype(np.int8), scales)


def quantized_on_host(kernel: np.ndarray, axis: int = 0) -> Weight:
    """`quantized` in NumPy, some outputs at a time: no other array is as large as the kernel."""
    step = max(1, AT_A_TIME // kernel.shape[axis])
    of_outputs = [slice(None)] * 2
    values, scales = [], []
    for first in range(0, kernel.shape[1 - axis], step):
        of_outputs[1 - axis] = slice(first, first + step)
        part = quantized(kernel[tuple(of_outputs)], axis)
        values.append(part.values)
        scales.append(part.scales)
    return Weight(np.concatenate(values, axis=1 - axis), np.concatenate(scales))


def rounded(x: Array) -> tuple[Array, Array]:
    """Positions [..., I] in int8, and 127 times the scale of each, float32 [..., 1].

    The latter is infinite or NaN if a number of the position is.
    """
    x = x.astype(jnp.float32)
    each = jnp.maximum(jnp.abs(x), TINY)
    peaks = each.max(axis=-1, keepdims=True)
    # On a TPU an operation on one number per position takes as long as one on all of x. Without the
    # maximum, which equals the peak, XLA would divide 1 by the peaks separately.
    return jnp.rint(x / jnp.maximum(peaks, each) * 127).astype(jnp.int8), peaks


class Projection(NamedTuple):
    """A weight, the sizes of the outputs that its product has side by side, and their bias.

    Several sizes are those of projections that a backend has fused into one product.
    """

    weight: Weight
    sizes: tuple[int, ...]
    bias: Array | None = None


class Norm(NamedTuple):
    """A norm of [..., D] in float32: over the root mean square or, with a shift, the deviation."""

    scale: Array  # [D]
    shift: Array | None  # [D]; with it, the mean is subtracted first.
    epsilon: float

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D] of the same type."""
        y = x.astype(jnp.float32)
        y = y if self.shift is None else y - y.mean(axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        y = y * lax.rsqrt(variance + self.epsilon) * self.scale
        return (y if self.shift is None else y + self.shift).astype(x.dtype)


class Rotation(NamedTuple):
    """Angles by which features i and i + H / 2 of heads of size H are rotated together."""

    cos: Array  # [B or 1, L, H / 2] float32.
    sin: Array

    def __call__(self, x: Array) -> Array:
        """[B, L, N, H] -> [B, L, N, H] of the same type."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attending(NamedTuple):
    """How attention scores are computed from queries and keys.

    In self-attention queries and keys are first normed by head, then rotated. `scale` multiplies
    their products, `soft_cap` C turns them into C tanh(score / C), and the biases are added:
    relative positions, and about -1e10 where a key must not be seen.
    """

    bias: Array  # [B or 1, N or 1, L or 1, T] float32.
    scale: float = 1.0
    soft_cap: float | None = None
    # [N, 2 L - 1] float32: biases of keys from L - 1 positions behind a query to as many ahead of
    # it, both among the same L positions. If keys repeat those positions, it applies to each copy.
    by_distance: Array | None = None
    norms: tuple[Norm, Norm] | None = None  # For queries and keys.
    rotation: Rotation | None = None

    def placed(self, x: Array, number: int) -> Array:
        """Queries (number 0) or keys (1) [B, L, heads, H], normed and rotated."""
        x = x if self.norms is None else self.norms[number](x)
        return x if self.rotation is None else self.rotation(x)

    def capped(self, scores: Array) -> Array:
        """Scores under the soft cap, if there is one."""
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def of_queries(self, first: Array | int, count: int) -> Array:
        """All biases of `count` queries from `first` on: [B or 1, N or 1, count or 1, T]."""
        bias, table = self.bias, self.by_distance
        if bias.shape[2] > count:
            bias = lax.dynamic_slice_in_dim(bias, first, count, axis=2)
        if table is None:
            return bias
        length = (table.shape[1] + 1) // 2
        # Queries that only pad a block may lie after the last position.
        table = jnp.pad(table, ((0, 0), (count, 1)))
        seen = lax.dynamic_slice_in_dim(table, length - first, length + count, axis=1)
        return jnp.tile(sheared(seen, count), bias.shape[3] // length) + bias


class Cache(NamedTuple):
    """Keys and values [B, K, T, H] of K heads, and where new ones enter."""

    keys: Array
    values: Array
    starts: Rows  # [B]
    length: int  # The new positions that enter; the others are padding.


def precision(x: Array) -> lax.Precision | None:
    """Full precision for float32, which GPUs and TPUs reduce, unless JAX is set otherwise.

    `JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32` is enough for training, and several times as fast.
    """
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 and chosen is None else None


def look_up(table: Array, index: Array) -> Array:
    """Rows [..., D] of an embedding [V, D], for index [...]."""
    if index.size > FEW:
        return jnp.take(table, index, axis=0)
    # On CPU, XLA assumes that a gather reads the whole table and splits it among threads; all that
    # follows would then run on another thread, which must wake first.
    rows = [lax.dynamic_slice_in_dim(table, i, 1) for i in index.reshape(-1)]
    return jnp.concatenate(rows).reshape(*index.shape, -1)


@dataclasses.dataclass(frozen=True)
class Xla:
    """Computes layers with weights as they are stored; other backends use prepacked ones.

    Results have the type of x. Queries are [B, L, N, H], keys and values [B, K, T, H], where K
    divides N: N / K neighbouring query heads share a key head.

    Attributes:
        rounds: whether the inputs of products with int8 kernels are rounded to int8, each
            position's with its own scale; otherwise kernels are widened as they are read.
        remat: the part of a layer that training computes again for the gradient, so that it need
            not be kept: "none", all but its input ("layers"), or all but that and the products with
            kernels ("products").
    """

    rounds: bool = False
    remat: str = "none"
    scores: ClassVar[Any] = jnp.float32  # The type of attention scores; None: as products.

    def along(self, x: Array, *axes: str) -> Array:
        """An array of these logical axes; if devices share it, laid out accordingly."""
        return x

    def width(self, batch: int, length: int) -> int:
        """Positions of a chunk with the padding that makes it fastest: at least `length`."""
        return length

    def cache_shape(self, batch: int, heads: int, length: int, size: int) -> tuple[int, ...]:
        """The shape of cached keys or values: [B, K, T, H], for heads of size H."""
        return batch, heads, length, size

    def product(
        self,
        x: Array,
        projection: Projection,
        norm: Norm | None = None,
        activation: str = "linear",
        out_dtype: str | None = None,
    ) -> Array:
        """The product of normed x [..., I] and a weight, with its bias, activated: [..., O]."""
        x = norm(x) if norm else x
        (kernel, scales), bias = projection.weight, projection.bias
        times = functools.partial(jnp.matmul, precision=precision(x))
        if scales is None:
            y = times(x, kernel.astype(x.dtype), preferred_element_type=out_dtype)
        elif self.rounds:
            inputs, peaks = rounded(x)
            sums = jnp.matmul(inputs, kernel, preferred_element_type=jnp.int32)
            y = sums.astype(jnp.float32) * (1 / 127) * peaks * scales
        else:
            y = times(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32) * scales
        y = y.astype(out_dtype or x.dtype)
        return ACTIVATE[activation](y if bias is None else y + bias.astype(x.dtype))

    def add_product(self, residual: Array, x: Array, projection: Projection) -> Array:
        """A residual [..., features] plus the product of x [..., I], with nothing between."""
        return residual + self.product(x, projection)

    def project(
        self, x: Array, projections: Sequence[Projection], norm: Norm | None
    ) -> list[Array]:
        """Every projection of x [B, L, I], normed if there is a norm, even of fused ones."""
        if norm and len(projections) > 1:
            x, norm = norm(x), None
        outputs = []
        for projection in projections:
            y = self.product(x, projection, norm)
            outputs += self.apart(y, projection.sizes)
        return outputs

    def apart(self, y: Array, sizes: Sequence[int]) -> list[Array]:
        """The projections of these sizes that a product [..., sum of sizes] has side by side."""
        return jnp.split(y, np.cumsum(sizes)[:-1], axis=-1)

    def gated(
        self, x: Array, projections: Sequence[Projection], norm: Norm, activations: Sequence[str]
    ) -> Array:
        """The projections of normed x [B, L, I], each activated, multiplied with one another."""
        hidden = self.project(x, projections, norm)
        active = [ACTIVATE[a](h) for a, h in zip(activations, hidden, strict=True)]
        return functools.reduce(jnp.multiply, active)

    def tied(self, x: Array, embedding: Array, norm: Norm | None) -> Array:
        """Products of normed x [B, L, D] with all of an embedding [V, D]: [B, L, V] float32."""
        x = norm(x) if norm else x
        by_row = ((2,), (1,)), ((), ())
        return lax.dot_general(x, embedding.astype(x.dtype), by_row, precision(x), jnp.float32)

    def split(self, x: Array, heads: int) -> Array:
        """Queries [B, L, N * H] by head: [B, L, N, H]."""
        return x.reshape(*x.shape[:2], heads, -1)

    def by_head(self, x: Array, heads: int) -> Array:
        """Keys or values [B, L, K * H] as caches hold them: [B, K, L, H]."""
        return self.split(x, heads).swapaxes(1, 2)

    def of_source(self, x: Array, projections: Sequence[Projection], heads: int) -> list[Array]:
        """Projections of an encoded source [B, S, I] as keys and values: [B, K, S, H] each."""
        return [self.by_head(self.product(x, each), heads) for each in projections]

    def at_a_time(self, q: Array, k: Array) -> int:
        """The number of queries [B, L, N, H] that attend together to keys [B, K, T, H]."""
        return q.shape[1] if q.shape[1] <= QUERIES else BLOCK

    def attention(self, q: Array, k: Array, v: Array, spec: Attending) -> Array:
        """Attention of queries [B, L, N, H] to keys and values: [B, L, N, H].

        See Vaswani et al., 3.2.1. Many queries come in blocks, one after another, so that scores
        are never all in memory.
        """
        length, count = q.shape[1], self.at_a_time(q, k)
        if length <= count:
            return self._attention(q, k, v, spec, spec.of_queries(0, length))
        room = (0, 0), (0, -length % count), (0, 0), (0, 0)
        q = jnp.pad(q, room)
        if spec.bias.shape[2] > 1:
            spec = spec._replace(bias=jnp.pad(spec.bias, (room[0], room[2], room[1], room[3])))

        def block(first: Array) -> Array:
            of_block = lax.dynamic_slice_in_dim(q, first, count, axis=1)
            return self._attention(of_block, k, v, spec, spec.of_queries(first, count))

        mixed = lax.map(block, jnp.arange(0, q.shape[1], count))  # [blocks, B, count, N, H]
        return mixed.swapaxes(0, 1).reshape(q.shape)[:, :length]

    def _attention(self, q: Array, k: Array, v: Array, spec: Attending, bias: Array) -> Array:
        batch, length, heads, size = q.shape
        q = (q * spec.scale).swapaxes(1, 2)
        if shared := heads // k.shape[1] > 1:  # Heads of one key act as more positions.
            q = q.reshape(batch, k.shape[1], -1, size)
        # BNLH, BNTH -> BNLT, then BNLT, BNTH -> BNLH; each `einsum` would be traced anew.
        of_heads, exact = ((0, 1), (0, 1)), precision(q)
        scores = lax.dot_general(q, k, (((3,), (3,)), of_heads), exact, self.scores or q.dtype)
        scores = scores.reshape(batch, heads, length, -1) if shared else scores
        weights = jax.nn.softmax(spec.capped(scores) + bias, axis=-1).astype(q.dtype)
        weights = weights.reshape(batch, k.shape[1], -1, k.shape[2]) if shared else weights
        mixed = lax.dot_general(weights, v, (((3,), (2,)), of_heads), exact)
        mixed = mixed.reshape(batch, heads, length, size) if shared else mixed
        return mixed.swapaxes(1, 2)

    def write(self, buffer: Array, chunk: Array, starts: Rows) -> Array:
        """Writes new positions [B, K, L, H] into a cache [B, K, T, H] from `starts` [B] on."""
        return write_rows(buffer, chunk, starts, axis=2)

    def self_attention(
        self,
        x: Array,
        projections: Sequence[Projection],
        norm: Norm,
        heads: int,
        spec: Attending,
        cache: Cache | None,
    ) -> tuple[Array, Array, Array]:
        """Attention of normed x [B, L, D] to itself, or to a cache that it enters.

        Returns [B, L, N, H], and the keys and values attended to: the positions' own, [B, K, L, H],
        or the cache's, including those.
        """
        query, *new = self.project(x, projections, norm)
        query, shared = self.split(query, heads), query.shape[-1] // new[0].shape[-1]
        if spec.norms or spec.rotation:
            query = spec.placed(query, 0)
            by_head = spec.placed(self.split(new[0], heads // shared), 1)
            new[0] = by_head.reshape(new[0].shape)
        new = new if cache is None else [y[:, : cache.length] for y in new]
        keys, values = (self.by_head(y, heads // shared) for y in new)
        if cache is not None:
            keys = self.write(cache.keys, keys, cache.starts)
            values = self.write(cache.values, values, cache.starts)
        return self.attention(query, keys, values, spec), keys, values
