"""The parts of a Transformer: projections, attention, feed-forward, relative positions.

Parameters carry T5X's names and shapes. Beside them a layer may find the same kernels
*packed* (see `packing`): fused, and laid out as a CPU reads them fastest.
"""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.models import kernels
from speculative.models.cache import write_rows
from speculative.models.config import Config

MASKED = -1e10
"""Added to the score of a position that must not be seen; finite, so padding stays finite."""

PACKED = "packed"
"""The collection of packed kernels."""

BIAS = "_bias"
"""What follows the name of fused kernels in the name of their biases, one after the other."""

ACTIVATE: dict[str, Callable[[Array], Array]] = {
    "gelu": nn.gelu,
    "relu": nn.relu,
    "linear": lambda x: x,
}
"""What the names in a configuration stand for."""

FEW = 16
"""Up to this many positions XLA on CPU multiplies fastest with the kernel as the left operand, and
looks rows up fastest one by one."""


def precision(x: Array) -> lax.Precision | None:
    """Full precision for float32: GPUs and TPUs shorten such products unless told not to."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


class LayerNorm(nn.Module):
    """A layer norm in float32: T5's has a scale alone, GPT's takes the mean away and shifts."""

    config: Config

    def setup(self) -> None:
        """Declares `scale` [D] and, for a GPT, `bias` [D]."""
        self.scale = self.param("scale", nn.initializers.ones, (self.config.emb_dim,))
        if self.config.gpt:
            self.bias = self.param("bias", nn.initializers.zeros, (self.config.emb_dim,))

    @property
    def numbers(self) -> Array:
        """What `kernels` norms by: the scale [D], or the scale and the shift [2 * D]."""
        return jnp.concatenate([self.scale, self.bias]) if self.config.gpt else self.scale

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        x, gpt = x.astype(jnp.float32), self.config.gpt
        x = x - x.mean(axis=-1, keepdims=True) if gpt else x
        epsilon = 1e-5 if gpt else 1e-6
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon) * self.scale
        return (x + self.bias if gpt else x).astype(self.config.dtype)


Dropout = Callable[[Array], Array]
"""What training does to a layer's output before it is added to the layer's input."""


class Dense(nn.Module):
    """A projection; its `kernel` is [in, features], as T5X stores it, and GPT's have a `bias`."""

    features: int
    dtype: str
    kernel_init: nn.initializers.Initializer
    out_dtype: str | None = None
    use_bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        norm: LayerNorm | None = None,
        activation: str = "linear",
        add: Array | None = None,
        dropout: Dropout | None = None,
    ) -> Array:
        """[..., in] -> [..., features]: of the normed x, activated, then dropout, plus `add`."""
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        if self.has_variable(PACKED, "kernel"):
            return packed_product(
                self.get_variable(PACKED, "kernel"), x, self.features, self.dtype, self.out_dtype,
                norm, bias, activation, add,
            )  # fmt: skip
        x = (norm(x) if norm else x).astype(self.dtype)
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        y = jnp.matmul(
            x, kernel.astype(self.dtype), precision=precision(x),
            preferred_element_type=self.out_dtype,
        )  # fmt: skip
        y = ACTIVATE[activation](y if bias is None else y + bias)
        y = dropout(y) if dropout else y
        return y if add is None else add + y

    @property
    def in_panels(self) -> bool:
        """Whether the kernel is packed for `kernels`: this is a CPU, and they serve."""
        return isinstance(self.get_variable(PACKED, "kernel"), kernels.Panels)


def packed_product(
    kernel: Array | kernels.Panels,
    x: Array,
    features: int,
    dtype: str,
    out_dtype: str | None = None,
    norm: LayerNorm | None = None,
    bias: Array | None = None,
    activation: str = "linear",
    add: Array | None = None,
) -> Array:
    """The product of x [..., in] with a packed kernel: [..., features]; see `Dense`."""
    if isinstance(kernel, kernels.Panels):
        numbers = norm.numbers if norm else None
        y = kernels.product(kernel, x, features, numbers, bias, activation, add)
        return y.astype(out_dtype or dtype)
    rows = (norm(x) if norm else x).reshape(-1, x.shape[-1]).astype(dtype)
    kernel = kernel.astype(dtype)
    contract = functools.partial(
        lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), precision=precision(rows),
        preferred_element_type=out_dtype,
    )  # fmt: skip
    if 1 < rows.shape[0] <= FEW:
        # Without the barrier XLA would fold the transpose back into the product.
        y = lax.optimization_barrier(contract(kernel, rows)).T
    else:
        y = contract(rows, kernel)
    y = y.reshape(*x.shape[:-1], features)
    y = ACTIVATE[activation](y if bias is None else y + bias.astype(y.dtype))
    return y if add is None else add + y


def project(
    module: nn.Module, packed: str, denses: list[Dense], x: Array, norm: LayerNorm | None = None
) -> list[Array]:
    """The projections of x by several kernels: one product where they are packed together."""
    if module.has_variable(PACKED, packed):
        ends = np.cumsum([dense.features for dense in denses])
        kernel = module.get_variable(PACKED, packed)
        bias = module.get_variable(PACKED, packed + BIAS)
        y = packed_product(kernel, x, int(ends[-1]), denses[0].dtype, norm=norm, bias=bias)
        return jnp.split(y, ends[:-1], axis=-1)
    x = norm(x) if norm else x
    return [dense(x) for dense in denses]


def look_up(embedder: nn.Embed, index: Array) -> Array:
    """Rows [..., D] of an embedding, for index [...]."""
    if index.size > FEW or jax.default_backend() != "cpu":
        return embedder(index)
    # XLA takes a gather to read the whole table, and so shares it out among its threads; all that
    # follows would then run on another one, which must wake first.
    rows = [lax.dynamic_slice_in_dim(embedder.embedding, i, 1) for i in index.reshape(-1)]
    return jnp.concatenate(rows).reshape(*index.shape, embedder.features)


def tied_logits(
    module: nn.Module, embedder: nn.Embed, x: Array, norm: LayerNorm | None = None
) -> Array:
    """Products of normed x [B, L, D] with every row of the embedding: [B, L, V] float32."""
    if module.has_variable(PACKED, "logits"):
        kernel, size = module.get_variable(PACKED, "logits"), embedder.num_embeddings
        return packed_product(kernel, x, size, str(x.dtype), "float32", norm)
    x = norm(x) if norm else x
    return jnp.einsum(
        "BLD,VD->BLV", x, embedder.embedding.astype(x.dtype),
        precision=precision(x), preferred_element_type=jnp.float32,
    )  # fmt: skip


def masked(seen: Array) -> Array:
    """What is added to scores so that only what is `seen` counts."""
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)


def same_segment(queries: Array, keys: Array, also: Array | bool = True) -> Array:
    """The mask [B, 1, Q, K] that keeps attention between equal segment numbers."""
    return masked((queries[:, :, None] == keys[:, None, :]) & also)[:, None]


def relative_buckets(distance: np.ndarray, bidirectional: bool, config: Config) -> np.ndarray:
    """T5's bucket of each distance (key position minus query position).

    Half the buckets are exact, the others grow logarithmically up to `max_distance`
    (Raffel et al., section 2.1). The logarithm is taken in float32, as T5 does: in float64
    a few distances would fall on the other side of a boundary.
    """
    buckets = config.num_buckets
    offset = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0) * buckets
        away = np.abs(distance)
    else:
        away = np.maximum(-distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (ratio / np.log(config.max_distance / exact) * (buckets - exact)).astype(np.int32)
    return offset + np.where(away < exact, away, np.minimum(far, buckets - 1))


class RelativeBias(nn.Module):
    """Relative position bias, one table for all layers of a stack."""

    config: Config
    bidirectional: bool

    def setup(self) -> None:
        """Declares `rel_embedding` [N, buckets]."""
        self.table = self.param(
            "rel_embedding",
            nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            (self.config.num_heads, self.config.num_buckets),
        )

    def __call__(self, length: int) -> Array:
        """The float32 bias among `length` positions: [1, N, length, length]."""
        distance = np.arange(length)[None, :] - np.arange(length)[:, None]
        buckets = relative_buckets(distance, self.bidirectional, self.config)
        return self.table.astype(jnp.float32)[None, :, buckets]

    def causal(self, starts: Array, length: int, cache: int) -> Array:
        """Bias and causal mask of a chunk against the cache.

        Args:
            starts: [B] position of each row's first query.
            length: L queries.
            cache: T keys.

        Returns:
            [B, N, L, T] float32; `MASKED` where the key lies after the query.
        """
        buckets = relative_buckets(-np.arange(cache)[::-1], False, self.config)
        return causal_bias(self.table.astype(jnp.float32)[:, buckets], starts, length)


def causal_bias(by_distance: Array, starts: Array, length: int) -> Array:
    """Bias and causal mask of a chunk against the cache.

    Args:
        by_distance: [N or 1, T] float32, the bias of a key T - 1 positions back, and so on to
            that of the query's own.
        starts: [B] position of each row's first query.
        length: L queries.

    Returns:
        [B, N or 1, L, T]; `MASKED` where the key lies after the query.
    """
    # Every row of the bias is a window on one table over distances, descending from
    # T - 1 to 0 and then masked: sliding it costs a slice, not a bucket computation.
    cache = by_distance.shape[1]
    table = jnp.pad(by_distance, ((0, 0), (0, cache)), constant_values=MASKED)

    def window(start: Array) -> Array:
        return jnp.stack(
            [
                lax.dynamic_slice_in_dim(table, cache - 1 - start - i, cache, axis=1)
                for i in range(length)
            ],
            axis=1,
        )

    return jax.vmap(window)(starts) if starts.shape[0] > 1 else window(starts[0])[None]


def split_heads(x: Array, heads: int) -> Array:
    """[B, L, N * H] -> [B, N, L, H]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Unscaled dot-product attention, as T5 has it; a GPT's queries come scaled.

    Args:
        query: [B, N, L, H].
        keys: [B, N, K, H].
        values: [B, N, K, H].
        bias: broadcastable to [B, N, L, K], float32, masks included.

    Returns:
        [B, L, N * H] in the query's dtype.
    """
    dtype = query.dtype
    scores = jnp.einsum(
        "BNLH,BNKH->BNLK", query, keys, precision=precision(query),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    weights = jax.nn.softmax(scores + bias, axis=-1).astype(dtype)
    mixed = jnp.einsum("BNLK,BNKH->BNLH", weights, values, precision=precision(query))
    batch, heads, length, size = mixed.shape
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


class Attention(nn.Module):
    """Multi-head attention; the parameters `query`, `key`, `value`, `out` are T5X's."""

    config: Config

    def setup(self) -> None:
        """Declares the four projections."""
        config = self.config
        width = config.num_heads * config.head_dim
        normal = functools.partial(
            nn.initializers.variance_scaling, mode="fan_in", distribution="normal"
        )
        dense = functools.partial(Dense, dtype=config.dtype, use_bias=config.gpt)
        # T5 folds attention's 1/sqrt(H) into the query's initial scale.
        query_scale = 1.0 if config.gpt else 1.0 / config.head_dim
        self.query = dense(width, kernel_init=normal(query_scale))
        self.key = dense(width, kernel_init=normal(1.0))
        self.value = dense(width, kernel_init=normal(1.0))
        self.out = dense(config.emb_dim, kernel_init=normal(1.0))

    def cross(
        self,
        x: Array,
        norm: LayerNorm,
        keys: Array,
        values: Array,
        bias: Array,
        dropout: Dropout | None = None,
    ) -> Array:
        """Of normed x [B, L, D] on projected keys and values [B * N, S, H], added to x."""
        return self._add_mixed(x, self.query(x, norm), keys, values, bias, dropout)

    def __call__(
        self, x: Array, norm: LayerNorm, bias: Array, dropout: Dropout | None = None
    ) -> Array:
        """Self-attention within normed x [B, L, D] under bias [B, N, L, L], added to x."""
        return self.prefill(x, norm, bias, dropout)[0]

    def prefill(
        self, x: Array, norm: LayerNorm, bias: Array, dropout: Dropout | None = None
    ) -> tuple[Array, Array, Array]:
        """The same, and the keys and values [B * N, L, H] that a cache begins with."""
        if self.out.in_panels:
            projected = self._projected(x, norm)
            mixed, keys, values = kernels.attend_self(
                projected, bias, self.config.num_heads, self._scale
            )
            mixed = self.out(mixed.reshape(*x.shape[:2], -1), add=x)
            return mixed, keys.astype(self.config.dtype), values.astype(self.config.dtype)
        query, key, value = project(self, *self._query_key_value, x, norm)
        keys, values = (split_heads(y, self.config.num_heads) for y in (key, value))
        mixed = self._add_mixed(x, query, keys, values, bias, dropout)
        cache = (-1, *keys.shape[2:])
        return mixed, keys.reshape(cache), values.reshape(cache)

    def cached(
        self, x: Array, norm: LayerNorm, bias: Array, keys: Array, values: Array, starts: Array
    ) -> tuple[Array, Array, Array]:
        """Self-attention of a normed chunk x [B, L, D], added to x, on caches [B * N, T, H].

        The chunk's keys and values are written at `starts` [B] first, then attended to.
        """
        if self.out.in_panels and keys.dtype == jnp.float32:
            projected = self._projected(x, norm)
            mixed, keys, values = kernels.attend_cached(
                projected, keys, values, bias, starts, self._scale
            )
            return self.out(mixed.reshape(*x.shape[:2], -1), add=x), keys, values
        query, *written = project(self, *self._query_key_value, x, norm)
        key, value = (split_heads(y, self.config.num_heads) for y in written)
        keys = write_rows(keys, key.reshape(-1, *key.shape[2:]), starts, axis=1)
        values = write_rows(values, value.reshape(-1, *value.shape[2:]), starts, axis=1)
        return self._add_mixed(x, query, keys, values, bias), keys, values

    def _add_mixed(
        self,
        x: Array,
        query: Array,
        keys: Array,
        values: Array,
        bias: Array,
        dropout: Dropout | None = None,
    ) -> Array:
        """The sum of x [B, L, D] and what query [B, L, N * H] finds among keys and values."""
        batch, length, heads, size = *x.shape[:2], self.config.num_heads, self.config.head_dim
        if self.out.in_panels:
            query = query.reshape(batch, length, heads, size)
            cache = (batch * heads, -1, size)
            mixed = kernels.attend(
                query, keys.reshape(cache), values.reshape(cache), bias, self._scale
            )
            mixed = mixed.reshape(batch, length, heads * size)
        else:
            cache = (batch, heads, -1, size)
            query = split_heads(query * self._scale, heads)
            mixed = attend(query, keys.reshape(cache), values.reshape(cache), bias)
        return self.out(mixed, add=x, dropout=dropout)

    def _projected(self, x: Array, norm: LayerNorm) -> Array:
        """Queries, keys and values of normed x [B, L, D], side by side: [B, L, 3 * N * H]."""
        kernel, width = self.get_variable(PACKED, "query_key_value"), self.query.features
        bias = self.get_variable(PACKED, "query_key_value" + BIAS)
        return packed_product(kernel, x, 3 * width, self.query.dtype, norm=norm, bias=bias)

    @property
    def _scale(self) -> float:
        """Of the products of queries and keys: T5 has it in the queries' kernels."""
        return self.config.head_dim**-0.5 if self.config.gpt else 1.0

    @property
    def _query_key_value(self) -> tuple[str, list[Dense]]:
        return "query_key_value", [self.query, self.key, self.value]


def project_source(layers: Sequence[Attention], encoded: Array) -> list[tuple[Array, Array]]:
    """Each layer's cross-attention keys and values of encoded [B, S, D]: two of [B * N, S, H]."""
    config = layers[0].config
    denses = [dense for layer in layers for dense in (layer.key, layer.value)]
    if denses[0].in_panels:
        packed = [dense.get_variable(PACKED, "kernel") for dense in denses]
        heads = kernels.heads(packed, encoded, config.num_heads, config.head_dim)
    else:
        heads = [split_heads(dense(encoded), config.num_heads) for dense in denses]
    heads = [y.reshape(-1, *y.shape[2:]).astype(config.dtype) for y in heads]
    return list(zip(heads[::2], heads[1::2], strict=True))


class Mlp(nn.Module):
    """T5's feed-forward layer: gated (`wi_0`, `wi_1`) in v1.1, plain (`wi`) in v1.0."""

    config: Config

    def setup(self) -> None:
        """Declares the input projections and `wo`."""
        config = self.config
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        dense = functools.partial(Dense, dtype=config.dtype, kernel_init=init, use_bias=config.gpt)
        if len(config.mlp_activations) == 1:
            self.wi = dense(config.mlp_dim)
        else:
            self.wi_0 = dense(config.mlp_dim)
            self.wi_1 = dense(config.mlp_dim)
        self.wo = dense(config.emb_dim)
        self.dropout = nn.Dropout(config.dropout_rate)

    def __call__(self, x: Array, norm: LayerNorm, dropout: Dropout | None = None) -> Array:
        """Of normed x [B, L, D], added to x; `dropout` in training alone."""
        y = self.dropout(self._hidden(x, norm), dropout is None)
        return self.wo(y, add=x, dropout=dropout)

    def _hidden(self, x: Array, norm: LayerNorm) -> Array:
        """[B, L, mlp_dim]: the activations, multiplied where there are two."""
        config = self.config
        activations = config.mlp_activations
        if len(activations) == 1:
            return self.wi(x, norm, *activations)
        if isinstance(packed := self.get_variable(PACKED, "wi_0_wi_1"), kernels.Gated):
            y = kernels.gated(packed, x, config.mlp_dim, activations, norm.numbers)
            return y.astype(config.dtype)
        hidden = project(self, "wi_0_wi_1", [self.wi_0, self.wi_1], x, norm)
        active = [ACTIVATE[a](h) for a, h in zip(activations, hidden, strict=True)]
        return functools.reduce(jnp.multiply, active)
