"""The parts of a Transformer: projections, attention, feed-forward, relative positions.

Parameters have T5X's names and shapes. Kernels may be prepacked; a backend computes with either.
"""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.backends import PREPACKED, Cache, Dropout, Xla, backend_of
from speculative.models.config import Config

# Added to the score of a position that must not be seen; finite, so padding stays finite.
MASKED = -1e10

# What attention reads of a source: keys and values [B, N, S, H], and a bias.
Source = tuple[Array, Array, Array]


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...]) -> Array:
    """A module's parameter: Flax's `param` of a given one would trace its initializer again."""
    given = module.get_variable("params", name)
    if given is not None and given.shape == shape:
        return given
    return module.param(name, init, shape)  # Made, or its error.


class LayerNorm(nn.Module):
    """A norm in float32, of the kind `Config.norm`."""

    config: Config

    def setup(self) -> None:
        """Declares `scale` [D] and, where the mean is taken away, `bias` [D]."""
        self._shifts = self.config.norm == "layer"
        self.scale = parameter(self, "scale", nn.initializers.ones, (self.config.emb_dim,))
        if self._shifts:
            self.bias = parameter(self, "bias", nn.initializers.zeros, (self.config.emb_dim,))

    @property
    def numbers(self) -> Array:
        """The scale [D], or the scale and the shift [2 * D], for `kernels`."""
        return jnp.concatenate([self.scale, self.bias]) if self._shifts else self.scale

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        x, shifts = x.astype(jnp.float32), self._shifts
        x = x - x.mean(axis=-1, keepdims=True) if shifts else x
        epsilon = 1e-5 if shifts else 1e-6
        x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon) * self.scale
        return (x + self.bias if shifts else x).astype(self.config.dtype)


class Dense(nn.Module):
    """A projection: `kernel` [in, features] and, as GPT's have one, `bias` [features]."""

    features: int
    dtype: str
    kernel_init: nn.initializers.Initializer
    out_dtype: str | None = None
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array, norm: LayerNorm | None = None, **after: Any) -> Array:
        """[..., in] -> [..., features] of the normed x; `after` the product as `Xla.product`."""
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
            bias = bias.astype(self.dtype)
        kernel = self.prepacked
        if kernel is None:
            kernel = parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features))
        formats = self.features, self.dtype, self.out_dtype
        return self.backend.product(kernel, x, *formats, norm, bias=bias, **after)

    @property
    def prepacked(self) -> Any:
        """The prepacked kernel, if there is one."""
        return self.get_variable(PREPACKED, "kernel")

    @property
    def backend(self) -> Xla:
        """What computes with the kernel, and with all others of its model."""
        return backend_of(self.prepacked)


def masked(seen: Array) -> Array:
    """What is added to scores so that only what is `seen` counts."""
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)


def same_segment(queries: Array, keys: Array, also: Array | bool = True) -> Array:
    """The mask [B, 1, Q, K] that keeps attention between equal segment numbers."""
    return masked((queries[:, :, None] == keys[:, None, :]) & also)[:, None]


def relative_buckets(distance: np.ndarray, bidirectional: bool, config: Config) -> np.ndarray:
    """T5's bucket of each distance, key position minus query position (Raffel et al., 2.1).

    Half the buckets are exact, the others grow logarithmically up to `max_distance`. In float64,
    unlike T5's float32, the logarithms of a few distances would cross a boundary.
    """
    buckets = config.num_buckets // (2 if bidirectional else 1)
    offset = (distance > 0) * buckets if bidirectional else 0
    away = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (ratio / np.log(config.max_distance / exact) * (buckets - exact)).astype(np.int32)
    return offset + np.where(away < exact, away, np.minimum(far, buckets - 1))


class RelativeBias(nn.Module):
    """Relative position bias: a table for all layers of a stack, or for one."""

    config: Config
    bidirectional: bool

    def setup(self) -> None:
        """Declares `rel_embedding` [N, buckets]."""
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape = self.config.num_heads, self.config.num_buckets
        self.table = parameter(self, "rel_embedding", init, shape)

    def __call__(self, length: int) -> Array:
        """The float32 bias among `length` positions: [1, N, length, length]."""
        distance = np.arange(length)[None, :] - np.arange(length)[:, None]
        buckets = relative_buckets(distance, self.bidirectional, self.config)
        return self.table.astype(jnp.float32)[None, :, buckets]

    def by_distance(self, cache: int) -> Array:
        """The float32 bias [N, T] of keys T - 1, ..., 0 positions back, for `causal_bias`."""
        buckets = relative_buckets(-np.arange(cache)[::-1], False, self.config)
        return self.table.astype(jnp.float32)[:, buckets]


class Attention(nn.Module):
    """Multi-head attention."""

    config: Config

    def setup(self) -> None:
        """Declares the four projections."""
        config = self.config
        width = config.num_heads * config.head_dim

        def dense(features: int, scale: float = 1.0) -> Dense:
            init = nn.initializers.variance_scaling(scale, "fan_in", "normal")
            return Dense(features, config.dtype, init, use_bias=config.biases)

        # T5 has attention's 1/sqrt(H) in the query's initial scale.
        self.query = dense(width, 1.0 if config.scaled_attention else 1.0 / config.head_dim)
        self.key, self.value, self.out = dense(width), dense(width), dense(config.emb_dim)
        self._scale = config.head_dim**-0.5 if config.scaled_attention else 1.0

    def __call__(
        self, x: Array, norm: LayerNorm, bias: Array, dropout: Dropout, cache: Cache | None
    ) -> tuple[Array, Array, Array]:
        """Self-attention of normed x [B, L, D] under bias [B, N, L, L or T], added to x.

        Also gives the keys and values: [B, N, L, H], or a longer cache [B, N, T, H].
        """
        backend, config = self.out.backend, self.config
        fused = self.get_variable(PREPACKED, "query_key_value")
        projected = backend.project(fused, [self.query, self.key, self.value], x, norm)
        mixed, *new = backend.attend_self(projected, bias, config.num_heads, self._scale, cache)
        keys, values = (y.astype(config.dtype) for y in new)
        return self.out(mixed, add=x, dropout=dropout), keys, values

    def cross(self, x: Array, norm: LayerNorm, source: Source, dropout: Dropout) -> Array:
        """Attention of normed x [B, L, D] to a source, added to x."""
        query, heads = self.query(x, norm), self.config.num_heads
        mixed = self.out.backend.attend(query, *source, heads, self._scale)
        return self.out(mixed, add=x, dropout=dropout)


class Mlp(nn.Module):
    """The feed-forward layer: gated (`wi_0`, `wi_1`) or not (`wi`)."""

    config: Config

    def setup(self) -> None:
        """Declares the input projections and `wo`."""
        config = self.config
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        dense = functools.partial(
            Dense, dtype=config.dtype, kernel_init=init, use_bias=config.biases
        )
        if config.gated:
            self.wi_0, self.wi_1 = dense(config.mlp_dim), dense(config.mlp_dim)
        else:
            self.wi = dense(config.mlp_dim)
        self.wo = dense(config.emb_dim)
        self.dropout = nn.Dropout(config.dropout_rate)

    def __call__(self, x: Array, norm: LayerNorm, dropout: Dropout) -> Array:
        """Of normed x [B, L, D], added to x; `dropout` in training alone."""
        activations = self.config.mlp_activations
        if self.config.gated:
            fused, denses = self.get_variable(PREPACKED, "wi_0_wi_1"), [self.wi_0, self.wi_1]
            y = self.wo.backend.gated(fused, denses, x, norm, activations)
        else:
            y = self.wi(x, norm, activation=activations[0])
        return self.wo(self.dropout(y, dropout is None), add=x, dropout=dropout)


class Reading(nn.Module):
    """A hidden state of so many features, normed, projected and added to a token's embedding."""

    config: Config
    features: int

    def setup(self) -> None:
        """Declares norm and projection."""
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.norm = LayerNorm(self.config.replace(emb_dim=self.features))
        self.dense = Dense(self.config.emb_dim, self.config.dtype, init)

    def __call__(self, hidden: Array, embedded: Array) -> Array:
        """[B, L, features] and [B, L, D] -> [B, L, D]."""
        return self.dense(hidden.astype(self.config.dtype), self.norm, add=embedded)


def shifted(x: Array, segments: Array) -> Array:
    """Of each position of x [B, L, ...] what is at the one before it; 0 where a text begins."""
    same = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    before = jnp.roll(x, 1, axis=1)
    return jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), before, 0)
