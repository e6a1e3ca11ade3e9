"""T5 as a model of three verbs: `start`, `extend`, `rewind`.

The Linen modules carry T5X's parameter names, so its checkpoints map on one to one; caches
are arguments and results. `T5` is all that the floors above see.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from speculative.models import cache as cache_lib
from speculative.models.cache import DecoderState
from speculative.models.config import T5Config
from speculative.models.layers import (
    MASKED,
    PACKED,
    Attention,
    Dense,
    LayerNorm,
    Mlp,
    RelativeBias,
    packed_product,
)
from speculative.types import PAD_ID, Inputs, Logits, PyTree, Rows, Tokens


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each normed before and added after."""

    config: T5Config

    def setup(self) -> None:
        """Declares the layer's parts under T5X's names."""
        config = self.config
        self.pre_attention_layer_norm = LayerNorm(config.dtype)
        self.attention = Attention(config)
        self.pre_mlp_layer_norm = LayerNorm(config.dtype)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(self, x: Array, bias: Array, train: bool) -> Array:
        """[B, S, D] -> [B, S, D]."""
        y = self.attention(self.pre_attention_layer_norm(x), bias)
        x = x + self.dropout(y, not train)
        return x + self.dropout(self.mlp(self.pre_mlp_layer_norm(x), train), not train)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward."""

    config: T5Config

    def setup(self) -> None:
        """Declares the layer's parts under T5X's names."""
        config = self.config
        self.pre_self_attention_layer_norm = LayerNorm(config.dtype)
        self.self_attention = Attention(config)
        self.pre_cross_attention_layer_norm = LayerNorm(config.dtype)
        self.encoder_decoder_attention = Attention(config)
        self.pre_mlp_layer_norm = LayerNorm(config.dtype)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(
        self, x: Array, bias: Array, encoded: Array, source_bias: Array, train: bool
    ) -> Array:
        """Teacher forcing, without a cache: [B, L, D] -> [B, L, D]."""
        y = self.self_attention(self.pre_self_attention_layer_norm(x), bias)
        x = x + self.dropout(y, not train)
        keys, values = self.encoder_decoder_attention.project_source(encoded)
        y = self._cross(x, keys, values, source_bias)
        x = x + self.dropout(y, not train)
        return x + self.dropout(self.mlp(self.pre_mlp_layer_norm(x), train), not train)

    def cached(
        self, x: Array, bias: Array, state: DecoderState, layer: int
    ) -> tuple[Array, Array, Array]:
        """A chunk x [B, L, D] on the state's caches: x, new keys, new values."""
        y, keys, values = self.self_attention.cached(
            self.pre_self_attention_layer_norm(x),
            bias,
            state.keys[layer],
            state.values[layer],
            state.lengths,
        )
        x = x + y
        x = x + self._cross(
            x, state.cross_keys[layer], state.cross_values[layer], state.source_bias
        )
        return x + self.mlp(self.pre_mlp_layer_norm(x)), keys, values

    def _cross(self, x: Array, keys: Array, values: Array, bias: Array) -> Array:
        normed = self.pre_cross_attention_layer_norm(x)
        return self.encoder_decoder_attention.cross(normed, keys, values, bias)


class Encoder(nn.Module):
    """The encoder stack."""

    config: T5Config

    def setup(self) -> None:
        """Declares the stack."""
        config = self.config
        self.relpos_bias = RelativeBias(config, bidirectional=True)
        self.layers = [EncoderLayer(config) for _ in range(config.num_encoder_layers)]
        self.encoder_norm = LayerNorm(config.dtype)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(self, x: Array, mask: Array, train: bool = False) -> Array:
        """Embedded source [B, S, D] under a mask [B or 1, 1, S or 1, S] -> [B, S, D]."""
        x = self.dropout(x, not train)
        bias = self.relpos_bias(x.shape[1]) + mask
        for layer in self.layers:
            x = layer(x, bias, train)
        return self.dropout(self.encoder_norm(x), not train)


class Decoder(nn.Module):
    """The decoder stack, up to the last norm."""

    config: T5Config

    def setup(self) -> None:
        """Declares the stack."""
        config = self.config
        self.relpos_bias = RelativeBias(config, bidirectional=False)
        self.layers = [DecoderLayer(config) for _ in range(config.num_decoder_layers)]
        self.decoder_norm = LayerNorm(config.dtype)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))
        if not config.logits_via_embedding:
            self.logits_dense = Dense(
                config.vocab_size,
                config.dtype,
                nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
                out_dtype="float32",
            )

    def __call__(
        self, x: Array, encoded: Array, mask: Array, source_mask: Array, train: bool
    ) -> Array:
        """Teacher forcing: hidden states [B, L, D] for embedded tokens [B, L, D]."""
        x = self.dropout(x, not train)
        bias = self.relpos_bias(x.shape[1]) + mask
        for layer in self.layers:
            x = layer(x, bias, encoded, source_mask, train)
        return self.dropout(self.decoder_norm(x), not train)

    def project_source(self, encoded: Array) -> list[tuple[Array, Array]]:
        """Every layer's cross-attention keys and values."""
        return [layer.encoder_decoder_attention.project_source(encoded) for layer in self.layers]

    def cached(self, x: Array, state: DecoderState) -> tuple[Array, DecoderState]:
        """A chunk: hidden states [B, L, D] and the state that holds the chunk too."""
        length, cache = x.shape[1], state.keys[0].shape[1]
        bias = self.relpos_bias.causal(state.lengths, length, cache)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            x, key, value = layer.cached(x, bias, state, i)
            keys.append(key)
            values.append(value)
        state = dataclasses.replace(
            state, lengths=state.lengths + length, keys=tuple(keys), values=tuple(values)
        )
        return self.decoder_norm(x), state


class Transformer(nn.Module):
    """Encoder and decoder over one embedding; the root of T5X's parameter tree."""

    config: T5Config

    def setup(self) -> None:
        """Declares embedding and stacks."""
        config = self.config
        self.token_embedder = nn.Embed(
            config.vocab_size, config.emb_dim, embedding_init=nn.initializers.normal(1.0)
        )
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def __call__(
        self,
        inputs: Array,
        decoder_inputs: Array,
        segments: tuple[Array, Array] | None = None,
        train: bool = False,
    ) -> Array:
        """Teacher forcing: float32 logits [B, L, V].

        `segments` ([B, S], [B, L]) number the examples packed into a row from 1 (0 is
        padding); attention stays within an example.
        """
        source, target = segments or (inputs != PAD_ID, jnp.ones_like(decoder_inputs))
        causal = jnp.tril(jnp.ones((decoder_inputs.shape[1],) * 2, bool))
        encoded = self.encoder(self._embed(inputs), _same(source, source), train)
        x = self.decoder(
            self._embed(decoder_inputs),
            encoded,
            _same(target, target, causal),
            _same(target, source) if segments else _masked(source)[:, None, None, :],
            train,
        )
        return self._logits(x)

    def start(self, inputs: Inputs, cache_length: int) -> DecoderState:
        """The state before the first token; see `T5.start`."""
        config = self.config
        mask = _masked(inputs != PAD_ID)[:, None, None, :]
        cross = self.decoder.project_source(self.encoder(self._embed(inputs), mask))
        shape = (inputs.shape[0] * config.num_heads, cache_length, config.head_dim)
        empty = tuple(jnp.zeros(shape, config.dtype) for _ in cross)
        return DecoderState(
            lengths=jnp.zeros(inputs.shape[0], jnp.int32),
            keys=empty,
            values=empty,
            cross_keys=tuple(keys for keys, _ in cross),
            cross_values=tuple(values for _, values in cross),
            source_bias=mask,
        )

    def extend(
        self, state: DecoderState, tokens: Tokens, at: Rows | None = None
    ) -> tuple[Logits, DecoderState]:
        """A chunk; see `T5.extend`."""
        x, state = self.decoder.cached(self._embed(tokens), state)
        if at is not None:
            x = cache_lib.read_rows(x, at, 1)
        return self._logits(x), state

    def _embed(self, tokens: Array) -> Array:
        return self.token_embedder(tokens).astype(self.config.dtype)

    def _logits(self, x: Array) -> Array:
        if not self.config.logits_via_embedding:
            return self.decoder.logits_dense(x)
        kernel = self.token_embedder.embedding.astype(x.dtype)
        return packed_product(kernel, x * self.config.emb_dim**-0.5, "float32")


def _masked(seen: Array) -> Array:
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)


def _same(queries: Array, keys: Array, also: Array | bool = True) -> Array:
    """The mask [B, 1, Q, K] that keeps attention between equal segment numbers."""
    return _masked((queries[:, :, None] == keys[:, None, :]) & also)[:, None]


@dataclasses.dataclass(frozen=True)
class T5:
    """A T5 of a given configuration, as pure functions on explicit parameters.

    Hashable, so it can be a static argument of `jax.jit`. `params` is what `init` or a
    checkpoint gives, or what `packing.pack` makes of it.
    """

    config: T5Config

    @functools.cached_property
    def _module(self) -> Transformer:
        return Transformer(self.config)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        return self.config.vocab_size

    def init(self, key: Array) -> PyTree:
        """T5's random initialisation: a tree with T5X's names, float32."""
        tokens = jnp.ones((1, 1), jnp.int32)
        return self._module.init(key, tokens, tokens)["params"]

    def forward(
        self,
        params: PyTree,
        inputs: Inputs,
        decoder_inputs: Tokens,
        segments: tuple[Array, Array] | None = None,
        dropout_key: Array | None = None,
    ) -> Logits:
        """Teacher-forced logits [B, L, V], float32; dropout where a key is given.

        `segments`, ([B, S], [B, L]), number the examples packed into each row.
        """
        return self._apply(
            params,
            inputs,
            decoder_inputs,
            segments,
            dropout_key is not None,
            rngs=None if dropout_key is None else {"dropout": dropout_key},
        )

    def start(self, params: PyTree, inputs: Inputs, cache_length: int) -> DecoderState:
        """Encodes inputs [B, S] (0 = padding) and projects cross-attention once.

        Returns a state with room for `cache_length` tokens a row, holding none.
        """
        return self._apply(params, inputs, cache_length, method="start")

    def extend(
        self, params: PyTree, state: DecoderState, tokens: Tokens, at: Rows | None = None
    ) -> tuple[Logits, DecoderState]:
        """Appends a chunk tokens [B, L] to each row.

        Returns float32 logits [B, L, V], entry l conditioned on everything up to and
        including tokens[:, l], and the longer state. With `at` [B], only the logits of
        position at[b] of the chunk: [B, 1, V]. The cache must have room for L more tokens.
        """
        return self._apply(params, state, tokens, at, method="extend")

    def rewind(self, state: DecoderState, lengths: Rows) -> DecoderState:
        """Forgets each row's tokens beyond lengths [B]."""
        return cache_lib.rewind(state, lengths)

    def _apply(self, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        variables = params if PACKED in params else {"params": params}
        return self._module.apply(variables, *args, **kwargs)


def abstract_params(config: T5Config) -> PyTree:
    """Shapes of a configuration's parameters, with nothing allocated."""
    return jax.eval_shape(T5(config).init, jax.random.key(0))
