"""Products and attention as XLA computes them, on any device, of weights as they are stored."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.ragged import write_rows
from speculative.types import Rows

FEW = 16  # Up to this many rows of a table XLA on CPU looks up fastest one by one.

# The functions of `types.ACTIVATIONS`.
ACTIVATE: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
}

# A layer's norm, a function of [..., D] whose `numbers` are its scale [D], or scale and shift; and
# layers' projections, functions of [..., D] with `features`, `dtype` and a `prepacked` kernel.
Norm = Any
Denses = Sequence[Any]
# What training does to a layer's output before it is added to the layer's input.
Dropout = Callable[[Array], Array] | None
# Keys and values [B, N, T, H], the positions [B] at which new ones enter, and how many do.
Cache = tuple[Array, Array, Rows, int]
# What `Xla.project` gives: queries, keys and values as the backend has them.
Parts = tuple[Array, ...]


class Fused(NamedTuple):
    """Prepacked kernels of several projections of one input, and their biases or None."""

    kernel: Any
    bias: Array | None


def precision(x: Array) -> lax.Precision | None:
    """Full precision for float32, which GPUs and TPUs shorten, unless JAX was told otherwise.

    `JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32` is enough for training, and several times as fast.
    """
    told = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 and told is None else None


def look_up(table: Array, index: Array) -> Array:
    """Rows [..., D] of an embedding [V, D], for index [...]."""
    if index.size > FEW:
        return jnp.take(table, index, axis=0)
    # On CPU, XLA assumes that a gather reads the whole table and splits it among threads; all that
    # follows would then run on another thread, which must wake first.
    rows = [lax.dynamic_slice_in_dim(table, i, 1) for i in index.reshape(-1)]
    return jnp.concatenate(rows).reshape(*index.shape, -1)


class Xla:
    """How layers compute: this one with weights as they are stored, others with prepacked ones.

    A norm is applied to a product's input first. Keys and values are [B, N, K, H], of N heads;
    attention's bias broadcasts to [B, N, L, K], masks included, and `scale` multiplies the
    products of queries and keys.
    """

    def product(
        self,
        kernel: Any,
        x: Array,
        features: int,
        dtype: str,
        out_dtype: str | None = None,
        norm: Norm = None,
        *,
        bias: Array | None = None,
        activation: str = "linear",
        add: Array | None = None,
        dropout: Dropout = None,
    ) -> Array:
        """Of x [..., I] and a kernel: [..., features], activated, then dropout, plus `add`."""
        x = (norm(x) if norm else x).astype(dtype)
        y = jnp.matmul(
            x, kernel.astype(dtype), precision=precision(x), preferred_element_type=out_dtype
        )
        y = ACTIVATE[activation](y if bias is None else y + bias.astype(y.dtype))
        y = dropout(y) if dropout else y
        return y if add is None else add + y

    def width(self, batch: int, length: int) -> int:
        """Positions of a chunk with the padding that makes it fastest: at least `length`."""
        return length

    def cache_shape(self, batch: int, heads: int, length: int, size: int) -> tuple[int, ...]:
        """Of keys or values: [B, N, T, H], for heads of a size H."""
        return batch, heads, length, size

    def project(self, fused: Fused | None, denses: Denses, x: Array, norm: Norm) -> Parts:
        """The projections of normed x [B, L, D] by several kernels, or by one product of all."""
        if fused is None:
            x = norm(x)
            return tuple(dense(x) for dense in denses)
        ends = np.cumsum([dense.features for dense in denses])
        return tuple(jnp.split(self._fused(fused, denses, x, norm), ends[:-1], axis=-1))

    def _fused(self, fused: Fused, denses: Denses, x: Array, norm: Norm) -> Array:
        width = sum(dense.features for dense in denses)
        return self.product(fused.kernel, x, width, denses[0].dtype, None, norm, bias=fused.bias)

    def gated(
        self, fused: Any, denses: Denses, x: Array, norm: Norm, activations: Sequence[str]
    ) -> Array:
        """The products of normed x [B, L, D], each activated, multiplied with one another."""
        hidden = self.project(fused, denses, x, norm)
        active = [ACTIVATE[a](h) for a, h in zip(activations, hidden, strict=True)]
        return functools.reduce(jnp.multiply, active)

    def tied(self, kernel: Any, embedding: Array, x: Array, norm: Norm) -> Array:
        """Products of x [B, L, D] with every row of an embedding [V, D]: [B, L, V] float32."""
        x = norm(x) if norm else x
        by_row = ((2,), (1,)), ((), ())
        return lax.dot_general(x, embedding.astype(x.dtype), by_row, precision(x), jnp.float32)

    def heads(self, denses: Denses, x: Array, heads: int) -> list[Array]:
        """The projections of x [B, S, D] as keys and values, [B, N, S, H] each."""
        return [self.taken_apart(dense(x), heads) for dense in denses]

    def taken_apart(self, x: Array, heads: int) -> Array:
        """Keys or values [B, L, N * H] as caches hold them: [B, N, L, H]."""
        return split_heads(x, heads)

    def attend(
        self, query: Array, keys: Array, values: Array, bias: Array, heads: int, scale: float
    ) -> Array:
        """Dot-product attention of queries [B, L, N * H]: [B, L, N * H]."""
        batch, length, width = query.shape
        query = split_heads(query * scale, heads)
        # BNLH, BNKH -> BNLK, then BNLK, BNKH -> BNLH; each `einsum` would be traced anew.
        heads_of, exact = ((0, 1), (0, 1)), precision(query)
        scores = lax.dot_general(query, keys, (((3,), (3,)), heads_of), exact, jnp.float32)
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(query.dtype)
        mixed = lax.dot_general(weights, values, (((3,), (2,)), heads_of), exact)
        return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width)

    def attend_self(
        self, projected: Parts, bias: Array, heads: int, scale: float, cache: Cache | None
    ) -> tuple[Array, Array, Array]:
        """Self-attention of L positions: [B, L, N * H], and the keys and values attended to.

        These are the positions' own, or a cache that they entered.
        """
        query, *new = projected
        keys, values = (self.taken_apart(x, heads) for x in new)
        if cache is not None:
            *caches, starts, count = cache
            new = zip(caches, (keys, values), strict=True)
            keys, values = (write_rows(old, x[:, :, :count], starts, axis=2) for old, x in new)
        return self.attend(query, keys, values, bias, heads, scale), keys, values


def split_heads(x: Array, heads: int) -> Array:
    """[B, L, N * H] -> [B, N, L, H]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
