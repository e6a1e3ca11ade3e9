"""T5 as a model of three verbs: `start`, `extend`, `rewind`.

The Linen modules carry T5X's parameter names, so its checkpoints map on one to one; caches
are arguments and results. `T5` is all that the floors above see.
"""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from speculative.models import cache as cache_lib
from speculative.models.cache import DecoderState
from speculative.models.config import T5Config
from speculative.models.layers import (
    Attention,
    Dense,
    LayerNorm,
    Mlp,
    RelativeBias,
    look_up,
    masked,
    project_source,
    same_segment,
    tied_logits,
)
from speculative.models.model import FlaxModel
from speculative.types import PAD_ID, Inputs, Logits, PyTree, Rows, Tokens


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each normed before and added after."""

    config: T5Config

    def setup(self) -> None:
        """Declares the layer's parts under T5X's names."""
        config = self.config
        self.pre_attention_layer_norm = LayerNorm(config)
        self.attention = Attention(config)
        self.pre_mlp_layer_norm = LayerNorm(config)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(self, x: Array, bias: Array, train: bool) -> Array:
        """[B, S, D] -> [B, S, D]."""
        dropout = functools.partial(self.dropout, deterministic=False) if train else None
        x = self.attention(x, self.pre_attention_layer_norm, bias, dropout)
        return self.mlp(x, self.pre_mlp_layer_norm, dropout)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward."""

    config: T5Config

    def setup(self) -> None:
        """Declares the layer's parts under T5X's names."""
        config = self.config
        self.pre_self_attention_layer_norm = LayerNorm(config)
        self.self_attention = Attention(config)
        self.pre_cross_attention_layer_norm = LayerNorm(config)
        self.encoder_decoder_attention = Attention(config)
        self.pre_mlp_layer_norm = LayerNorm(config)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(
        self, x: Array, bias: Array, encoded: Array, source_bias: Array, train: bool
    ) -> Array:
        """Teacher forcing, without a cache: [B, L, D] -> [B, L, D]."""
        dropout = functools.partial(self.dropout, deterministic=False) if train else None
        x = self.self_attention(x, self.pre_self_attention_layer_norm, bias, dropout)
        cross = self.encoder_decoder_attention
        keys, values = project_source([cross], encoded)[0]
        x = cross.cross(x, self.pre_cross_attention_layer_norm, keys, values, source_bias, dropout)
        return self.mlp(x, self.pre_mlp_layer_norm, dropout)

    def cached(
        self, x: Array, bias: Array, state: DecoderState, layer: int
    ) -> tuple[Array, Array, Array]:
        """A chunk x [B, L, D] on the state's caches: x, new keys, new values."""
        x, keys, values = self.self_attention.cached(
            x,
            self.pre_self_attention_layer_norm,
            bias,
            state.keys[layer],
            state.values[layer],
            state.lengths,
        )
        x = self.encoder_decoder_attention.cross(
            x,
            self.pre_cross_attention_layer_norm,
            state.cross_keys[layer],
            state.cross_values[layer],
            state.source_bias,
        )
        return self.mlp(x, self.pre_mlp_layer_norm), keys, values


class Encoder(nn.Module):
    """The encoder stack."""

    config: T5Config

    def setup(self) -> None:
        """Declares the stack."""
        config = self.config
        self.relpos_bias = RelativeBias(config, bidirectional=True)
        self.layers = [EncoderLayer(config) for _ in range(config.num_encoder_layers)]
        self.encoder_norm = LayerNorm(config)
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
        self.decoder_norm = LayerNorm(config)
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
        """Every layer's cross-attention keys and values [B * N, S, H]."""
        return project_source([layer.encoder_decoder_attention for layer in self.layers], encoded)

    def cached(self, x: Array, state: DecoderState) -> tuple[Array, DecoderState]:
        """A chunk: hidden states [B, L, D] before the last norm, and the longer state."""
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
        return x, state


class Transformer(nn.Module):
    """Encoder and decoder over one embedding; the root of T5X's parameter tree."""

    config: T5Config

    def setup(self) -> None:
        """Declares embedding and stacks."""
        config = self.config
        self.token_embedder = nn.Embed(
            config.vocab_size, config.emb_dim, embedding_init=nn.initializers.normal(1.0)
        )
        if not config.source_dim:
            self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, inputs: Array, segments: Array | None = None, train: bool = False) -> Array:
        """Inputs [B, S] -> [B, S, D]; see `T5.encode`."""
        mask = _padding(inputs) if segments is None else same_segment(segments, segments)
        return self.encoder(self._embed(inputs), mask, train)

    def __call__(
        self,
        inputs: Array,
        decoder_inputs: Array,
        segments: tuple[Array, Array] | None = None,
        train: bool = False,
        encoded: Array | None = None,
    ) -> Array:
        """Teacher forcing; see `T5.forward`."""
        source, target = segments or (None, jnp.ones_like(decoder_inputs))
        causal = jnp.tril(jnp.ones((decoder_inputs.shape[1],) * 2, bool))
        if encoded is None:
            encoded = self.encode(inputs, source, train)
        x = self.decoder(
            self._embed(decoder_inputs),
            encoded,
            same_segment(target, target, causal),
            _padding(inputs) if source is None else same_segment(target, source),
            train,
        )
        return self._logits(x)

    def start(self, inputs: Inputs, cache_length: int, encoded: Array | None) -> DecoderState:
        """The state before the first token; see `T5.start`."""
        config = self.config
        encoded = self.encode(inputs) if encoded is None else encoded
        cross = self.decoder.project_source(encoded)
        shape = (inputs.shape[0] * config.num_heads, cache_length, config.head_dim)
        empty = tuple(jnp.zeros(shape, config.dtype) for _ in cross)
        return DecoderState(
            lengths=jnp.zeros(inputs.shape[0], jnp.int32),
            keys=empty,
            values=empty,
            cross_keys=tuple(keys for keys, _ in cross),
            cross_values=tuple(values for _, values in cross),
            source_bias=_padding(inputs),
            encoded=encoded,
        )

    def extend(
        self, state: DecoderState, tokens: Tokens, at: Rows | None = None
    ) -> tuple[Logits, DecoderState]:
        """A chunk; see `T5.extend`."""
        x, state = self.decoder.cached(self._embed(tokens), state)
        if at is not None:
            x = cache_lib.read_rows(x, at, 1)
        return self._logits(x, self.decoder.decoder_norm), state

    def _embed(self, tokens: Array) -> Array:
        return look_up(self.token_embedder, tokens).astype(self.config.dtype)

    def _logits(self, x: Array, norm: LayerNorm | None = None) -> Array:
        config = self.config
        if not config.logits_via_embedding:
            return self.decoder.logits_dense(x, norm)
        return tied_logits(self, self.token_embedder, x, norm) * config.emb_dim**-0.5


def _padding(inputs: Array) -> Array:
    """The mask [B, 1, 1, S] of a source."""
    return masked(inputs != PAD_ID)[:, None, None, :]


@dataclasses.dataclass(frozen=True)
class T5(FlaxModel):
    """A T5 of a given configuration, as pure functions on explicit parameters."""

    config: T5Config
    pad_id: ClassVar[int] = PAD_ID
    continues: ClassVar[bool] = False
    _root = Transformer

    def init(self, key: Array) -> PyTree:
        """T5's random initialisation: a tree with T5X's names, float32."""
        tokens, size = jnp.ones((1, 1), jnp.int32), self.config.source_dim
        encoded = jnp.ones((1, 1, size)) if size else None
        return self._module.init(key, tokens, tokens, encoded=encoded)["params"]

    def encode(self, params: PyTree, inputs: Inputs, segments: Array | None = None) -> Array:
        """The encoder's output [B, S, D] for inputs [B, S] (0 = padding).

        `segments` [B, S] number the examples packed into each row from 1 (0 is padding).
        """
        return self._apply(params, inputs, segments, method="encode")

    def first(self, inputs: Inputs) -> Rows:
        """The start token of each row: [B]."""
        return jnp.full(inputs.shape[0], PAD_ID, jnp.int32)

    def start(
        self, params: PyTree, inputs: Inputs, cache_length: int, encoded: Array | None = None
    ) -> DecoderState:
        """Encodes inputs [B, S] (0 = padding) and projects cross-attention once.

        `encoded` [B, S, D] is what an encoder made of the inputs, by default the model's own.
        Returns a state with room for `cache_length` tokens a row, holding none.
        """
        return self._apply(params, inputs, cache_length, encoded, method="start")
