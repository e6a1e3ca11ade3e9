"""The parts of a Transformer: projections, norms, attention, feed-forward, relative positions.

Modules declare parameters, under T5X's names, and hand them to a backend, which computes. Kernels
may be prepacked.
"""

import functools
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.backends import PREPACKED, Attending, Cache, Norm, Projection, Weight, Xla
from speculative.models.config import Config
from speculative.models.positions import beside, relative_buckets


class Source(NamedTuple):
    """A source for attention: keys and values [B, K, S, H], and a bias [B, 1, 1, S]."""

    keys: Array
    values: Array
    bias: Array


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...]) -> Array:
    """A module's parameter; for an existing one, Flax's `param` would retrace its initializer."""
    existing = module.get_variable("params", name)
    if existing is not None and existing.shape == shape:
        return existing
    return module.param(name, init, shape)  # Makes it, or raises on a wrong shape.


class LayerNorm(nn.Module):
    """The parameters of a norm of the kind `Config.norm`."""

    config: Config

    def setup(self) -> None:
        """Declares `scale` [D] and, if the mean is subtracted, `bias` [D]."""
        shape, kind = (self.config.emb_dim,), self.config.norm
        zeros = nn.initializers.zeros
        scale = parameter(
            self, "scale", zeros if kind == "rms_of_1" else nn.initializers.ones, shape
        )
        scale = scale.astype(jnp.float32) + 1 if kind == "rms_of_1" else scale
        shift = parameter(self, "bias", zeros, shape) if kind == "layer" else None
        self.numbers = Norm(scale, shift, self.config.epsilon)


class Dense(nn.Module):
    """A projection: `kernel` [inputs, features] and maybe, as in GPT, `bias` [features]."""

    inputs: int
    features: int
    use_bias: bool = False
    scale: float = 1.0  # Scales the kernel's initial variance.
    distribution: Literal["truncated_normal", "normal"] = "truncated_normal"

    def setup(self) -> None:
        """Declares both, except a prepacked kernel."""
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
        weight = self.get_variable(PREPACKED, "kernel")
        if weight is None:
            shape, kind = (self.inputs, self.features), self.distribution
            init = nn.initializers.variance_scaling(self.scale, "fan_in", kind)
            weight = Weight(parameter(self, "kernel", init, shape))
        self.projection = Projection(weight, (self.features,), bias)


def projections(module: nn.Module, name: str, *denses: Dense) -> tuple[Projection, ...]:
    """Several projections of one input, or the one into which a backend fused them."""
    fused = module.get_variable(PREPACKED, name)
    if fused is None:
        return tuple(dense.projection for dense in denses)
    sizes = tuple(dense.features for dense in denses)
    return (Projection(fused["kernel"], sizes, fused.get("bias")),)


class RelativeBias(nn.Module):
    """Relative position bias: a table for all layers of a stack, or for one."""

    config: Config
    bidirectional: bool

    def setup(self) -> None:
        """Declares `rel_embedding` [N, buckets]."""
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape = self.config.num_heads, self.config.num_buckets
        self.table = parameter(self, "rel_embedding", init, shape)

    def by_distance(self, length: int, ahead: int = 1) -> Array:
        """Float32 bias for keys length - 1 positions back to ahead - 1 ahead: [N, distances]."""
        distance = np.arange(1 - length, ahead)
        buckets = relative_buckets(distance, self.bidirectional, self.config)
        return self.table.astype(jnp.float32)[:, buckets]


class Attention(nn.Module):
    """Multi-head attention, to itself or to a source of `source_dim` features.

    Only self-attention norms heads (`Config.head_norms`).
    """

    config: Config
    backend: Xla
    source_dim: int = 0

    def setup(self) -> None:
        """Declares the four projections, and the norms of queries and keys if there are any."""
        config, size = self.config, self.config.head_dim
        width, read = config.num_heads * size, self.source_dim or config.emb_dim
        biases = config.biases or config.qkv_biases
        dense = functools.partial(Dense, use_bias=biases, distribution="normal")
        # T5 folds attention's 1/sqrt(H) into the query's initial scale.
        initial = 1.0 if config.scaled_attention else 1.0 / size
        self.query = dense(config.emb_dim, width, scale=initial)
        self.key, self.value = (dense(read, config.kv_heads * size) for _ in range(2))
        self.out = dense(width, config.emb_dim, use_bias=config.biases)
        self.norms_heads = config.head_norms and not self.source_dim
        if self.norms_heads:
            of_head = config.replace(emb_dim=size)
            self.query_norm, self.key_norm = LayerNorm(of_head), LayerNorm(of_head)

    def _spec(self, spec: Attending) -> Attending:
        """Adds the scale, the soft cap and the norms."""
        norms = None
        if self.norms_heads:
            norms = self.query_norm.numbers, self.key_norm.numbers
        scale, cap = self.config.score_scale, self.config.score_cap or None
        return spec._replace(scale=scale, soft_cap=cap, norms=norms)

    def __call__(
        self, x: Array, norm: Norm, spec: Attending, cache: Cache | None
    ) -> tuple[Array, Array, Array]:
        """Self-attention of normed x [B, L, D], with this layer's scale, cap and norms in `spec`.

        The result [B, L, N * H] is the input of `out`. Also returns the keys and values:
        [B, K, L, H], or a longer cache [B, K, T, H].
        """
        of_all = projections(self, "query_key_value", self.query, self.key, self.value)
        spec, heads = self._spec(spec), self.config.num_heads
        mixed, keys, values = self.backend.self_attention(x, of_all, norm, heads, spec, cache)
        return mixed.reshape(*x.shape[:2], -1), keys, values

    def of_source(self, x: Array) -> tuple[Array, Array]:
        """Keys and values [B, K, S, H] of a source [B, S, D] for self-attention, not rotated."""
        of_all = projections(self, "query_key_value", self.query, self.key, self.value)
        backend, heads = self.backend, self.config.kv_heads
        _, keys, values = backend.project(x, of_all, None)
        if self.norms_heads:
            keys = self.key_norm.numbers(backend.split(keys, heads)).reshape(keys.shape)
        return backend.by_head(keys, heads), backend.by_head(values, heads)

    def cross(self, x: Array, norm: Norm, source: Source) -> Array:
        """Attention of normed x [B, L, D] to a source: [B, L, N * H], for `out`."""
        backend, spec = self.backend, self._spec(Attending(source.bias))
        query = backend.product(x, self.query.projection, norm)
        query = backend.split(query, self.config.num_heads)
        mixed = backend.attention(query, source.keys, source.values, spec)
        return mixed.reshape(*x.shape[:2], -1)


class Mlp(nn.Module):
    """The feed-forward layer: gated (`wi_0`, `wi_1`) or not (`wi`)."""

    config: Config
    backend: Xla

    def setup(self) -> None:
        """Declares the input projections and `wo`."""
        config = self.config
        dense = functools.partial(Dense, config.emb_dim, config.mlp_dim, config.biases)
        if config.gated:
            self.wi_0, self.wi_1 = (dense() for _ in range(2))
        else:
            self.wi = dense()
        self.wo = Dense(config.mlp_dim, config.emb_dim, config.biases)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))  # As in T5X.

    def __call__(self, x: Array, norm: Norm, train: bool) -> Array:
        """Maps normed x [B, L, D] to [B, L, mlp_dim], for `wo`; with dropout in training."""
        activations = self.config.mlp_activations
        if self.config.gated:
            both = projections(self, "wi_0_wi_1", self.wi_0, self.wi_1)
            y = self.backend.gated(x, both, norm, activations)
        else:
            y = self.backend.product(x, self.wi.projection, norm, activations[0])
        return self.dropout(y, not train)


def _merged(spec: Attending, source: Source, length: int) -> tuple[Attending, Cache]:
    """Attention of whole texts to a source and, after it in the cache, to themselves."""
    bias = beside(source.bias, spec.of_queries(0, length))
    room = (0, 0), (0, 0), (0, length), (0, 0)
    keys, values = (jnp.pad(x, room) for x in (source.keys, source.values))
    starts = jnp.full(len(keys), source.keys.shape[2])
    return spec._replace(bias=bias, by_distance=None), Cache(keys, values, starts, length)


class Layer(nn.Module):
    """Self-attention, attention to a source, feed-forward: each norms its input, adds its output.

    `Config.post_norms` norms the outputs too. A family with other layers has its own module with
    this `__call__`, as `Stack.layer`.
    """

    config: Config
    backend: Xla
    kind: str = "decoder"  # The kind of the stack; or "encoder".
    source_dim: int = 0  # Features of a source to attend to; 0: none.

    def setup(self) -> None:
        """Declares the layer's parts under T5X's names."""
        config, backend, encoder = self.config, self.backend, self.kind == "encoder"
        attention = "attention" if encoder else "self_attention"
        self.attention_norm = LayerNorm(config, name=f"pre_{attention}_layer_norm")
        self.attend = Attention(config, backend, name=attention)
        if not config.shared_positions:
            self.relative_posemb = RelativeBias(config, bidirectional=encoder)
        if self.source_dim:
            self.pre_cross_attention_layer_norm = LayerNorm(config)
            self.encoder_decoder_attention = Attention(config, backend, self.source_dim)
        self.pre_mlp_layer_norm = LayerNorm(config)
        self.mlp = Mlp(config, backend)
        if config.post_norms:
            after = LayerNorm(config, name=f"post_{attention}_layer_norm")
            self.post_self_attention_layer_norm = after
            self.post_mlp_layer_norm = LayerNorm(config)
            if self.source_dim:
                self.post_cross_attention_layer_norm = LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(
        self, x: Array, spec: Attending, train: bool, source: Source | None, cache: Cache | None
    ) -> tuple[Array, Array, Array]:
        """[B, L, D] -> [B, L, D], and keys and values [B, K, L or T, H] of self-attention."""
        if source is not None and self.config.merges_source:
            spec, cache, source = *_merged(spec, source, x.shape[1]), None
        mixed, keys, values = self.attend(x, self.attention_norm.numbers, spec, cache)
        x = self._add(x, mixed, self.attend.out, train, "self_attention")
        if source is not None:
            norm = self.pre_cross_attention_layer_norm.numbers
            cross = self.encoder_decoder_attention
            x = self._add(x, cross.cross(x, norm, source), cross.out, train, "cross_attention")
        hidden = self.mlp(x, self.pre_mlp_layer_norm.numbers, train)
        return self._add(x, hidden, self.mlp.wo, train, "mlp"), keys, values

    def _add(self, x: Array, y: Array, dense: Dense, train: bool, part: str) -> Array:
        """Adds a part's y to x [B, L, D], projected, then normed and dropped out as configured."""
        if not train and not self.config.post_norms:
            return self.backend.add_product(x, y, dense.projection)
        y = self.backend.product(y, dense.projection)
        if self.config.post_norms:
            y = getattr(self, f"post_{part}_layer_norm").numbers(y)
        return x + self.dropout(y, not train)
