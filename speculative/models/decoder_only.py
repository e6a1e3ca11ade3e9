"""Decoder-only models behind the same verbs: GPTs, and LaMDA's kind with a T5's layers.

Their inputs are prompts, which the outputs go on from. Parameters have T5X's names where a T5
has such a part.
"""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from speculative.models import cache as cache_lib
from speculative.models.cache import PromptedState
from speculative.models.config import DecoderOnlyConfig
from speculative.models.layers import (
    Attention,
    Dense,
    Dropout,
    LayerNorm,
    Mlp,
    RelativeBias,
    causal_bias,
    look_up,
    masked,
    same_segment,
    tied_logits,
)
from speculative.models.model import FlaxModel
from speculative.types import Inputs, Logits, PyTree, Rows, Tokens

PADDING = -1
"""What fills prompts up: every token from 0 on may be a piece, as it is in GPT-2's vocabulary."""


class Layer(nn.Module):
    """Self-attention and feed-forward, each normed before and added after."""

    config: DecoderOnlyConfig

    def setup(self) -> None:
        """Declares the layer's parts."""
        self.pre_self_attention_layer_norm = LayerNorm(self.config)
        self.self_attention = Attention(self.config)
        self.pre_mlp_layer_norm = LayerNorm(self.config)
        self.mlp = Mlp(self.config)

    def prefill(
        self, x: Array, bias: Array, dropout: Dropout | None = None
    ) -> tuple[Array, Array, Array]:
        """A whole text x [B, L, D]: the layer's output, and keys and values [B * N, L, H]."""
        norm = self.pre_self_attention_layer_norm
        x, keys, values = self.self_attention.prefill(x, norm, bias, dropout)
        return self.mlp(x, self.pre_mlp_layer_norm, dropout), keys, values

    def cached(
        self, x: Array, bias: Array, keys: Array, values: Array, starts: Array
    ) -> tuple[Array, Array, Array]:
        """A chunk x [B, L, D] on caches [B * N, T, H]: x, new keys, new values."""
        norm = self.pre_self_attention_layer_norm
        x, keys, values = self.self_attention.cached(x, norm, bias, keys, values, starts)
        return self.mlp(x, self.pre_mlp_layer_norm), keys, values


class Decoder(nn.Module):
    """The stack, positions and logits included."""

    config: DecoderOnlyConfig

    def setup(self) -> None:
        """Declares the stack."""
        config = self.config
        if config.gpt:
            self.position_embedder = nn.Embed(
                config.max_positions, config.emb_dim, embedding_init=nn.initializers.normal(0.01)
            )
        else:
            self.relpos_bias = RelativeBias(config, bidirectional=False)
        self.layers = [Layer(config) for _ in range(config.num_layers)]
        self.decoder_norm = LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))
        if not config.logits_via_embedding:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
            self.logits_dense = Dense(config.vocab_size, config.dtype, init, out_dtype="float32")

    def placed(self, x: Array, positions: Array) -> Array:
        """Embedded tokens [B, L, D] with what their positions [B, L] add, if anything."""
        if not self.config.gpt:
            return x
        # A last step may guess beyond the last position; unclipped, such keys would be NaN.
        positions = jnp.minimum(positions, self.config.max_positions - 1)
        return x + look_up(self.position_embedder, positions).astype(x.dtype)

    def __call__(self, x: Array, mask: Array, train: bool = False) -> tuple[Array, PromptedState]:
        """Whole texts x [B, L, D] under a mask [B, 1, L, L]: hidden states, keys and values."""
        dropout = functools.partial(self.dropout, deterministic=False) if train else None
        x = self.dropout(x, not train)
        bias = mask if self.config.gpt else self.relpos_bias(x.shape[1]) + mask
        keys, values = [], []
        for layer in self.layers:
            x, key, value = layer.prefill(x, bias, dropout)
            keys.append(key)
            values.append(value)
        nothing = jnp.zeros(x.shape[0], jnp.int32)
        return x, PromptedState(nothing, nothing, tuple(keys), tuple(values))

    def cached(self, x: Array, state: PromptedState) -> tuple[Array, PromptedState]:
        """A chunk: hidden states [B, L, D], and the longer state."""
        length, cache = x.shape[1], state.keys[0].shape[1]
        starts = state.prompt + state.lengths
        if self.config.gpt:
            bias = causal_bias(jnp.zeros((1, cache)), starts, length)
        else:
            bias = self.relpos_bias.causal(starts, length, cache)
        keys, values = [], []
        for layer, key, value in zip(self.layers, state.keys, state.values, strict=True):
            x, key, value = layer.cached(x, bias, key, value, starts)
            keys.append(key)
            values.append(value)
        lengths = state.lengths + length
        return x, PromptedState(lengths, state.prompt, tuple(keys), tuple(values))


class Transformer(nn.Module):
    """Embedding and stack; the root of the parameter tree."""

    config: DecoderOnlyConfig

    def setup(self) -> None:
        """Declares embedding and stack."""
        config = self.config
        # Tied to the output, so small enough for logits of about 1.
        init = nn.initializers.normal(config.emb_dim**-0.5)
        self.token_embedder = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
        self.decoder = Decoder(config)

    def __call__(
        self,
        inputs: Array,
        decoder_inputs: Array,
        segments: tuple[Array, Array] | None = None,
        train: bool = False,
        encoded: Array | None = None,
    ) -> Array:
        """Teacher forcing; see `FlaxModel.forward`."""
        of = jnp.ones_like(decoder_inputs) if segments is None else segments[1]
        places = jnp.arange(of.shape[1])
        begins = jnp.pad(of[:, 1:] != of[:, :-1], ((0, 0), (1, 0)))
        positions = places - lax.cummax(jnp.where(begins, places, 0), axis=1)
        causal = places[:, None] >= places
        x = self.decoder.placed(self._embed(decoder_inputs), positions)
        return self._logits(self.decoder(x, same_segment(of, of, causal), train)[0])

    def start(self, inputs: Inputs, cache_length: int) -> PromptedState:
        """The state behind a prompt; see `DecoderOnly.start`."""
        seen = inputs != PADDING
        places = jnp.arange(inputs.shape[1])
        x = self.decoder.placed(self._embed(jnp.where(seen, inputs, 0)), places[None])
        # Padding comes last: what it writes is masked until other tokens take its place.
        _, state = self.decoder(x, masked(places[:, None] >= places)[None, None])
        room = ((0, 0), (0, cache_length), (0, 0))
        keys, values = (
            tuple(jnp.pad(entry, room) for entry in entries)
            for entries in (state.keys, state.values)
        )
        prompt = seen.sum(axis=1, dtype=jnp.int32) - 1
        return PromptedState(state.lengths, prompt, keys, values)

    def extend(
        self, state: PromptedState, tokens: Tokens, at: Rows | None = None
    ) -> tuple[Logits, PromptedState]:
        """A chunk; see `FlaxModel.extend`."""
        starts = (state.prompt + state.lengths)[:, None]
        x = self.decoder.placed(self._embed(tokens), starts + jnp.arange(tokens.shape[1]))
        x, state = self.decoder.cached(x, state)
        if at is not None:
            x = cache_lib.read_rows(x, at, 1)
        return self._logits(x), state

    def _embed(self, tokens: Array) -> Array:
        return look_up(self.token_embedder, tokens).astype(self.config.dtype)

    def _logits(self, x: Array) -> Array:
        norm = self.decoder.decoder_norm
        if self.config.logits_via_embedding:
            return tied_logits(self, self.token_embedder, x, norm)
        return self.decoder.logits_dense(x, norm)


@dataclasses.dataclass(frozen=True)
class DecoderOnly(FlaxModel):
    """A decoder-only model of a given configuration, as pure functions on explicit parameters."""

    config: DecoderOnlyConfig
    pad_id: ClassVar[int] = PADDING
    continues: ClassVar[bool] = True
    _root = Transformer

    def init(self, key: Array) -> PyTree:
        """Random parameters to train, float32."""
        tokens = jnp.ones((1, 1), jnp.int32)
        return self._module.init(key, tokens, tokens)["params"]

    def encode(self, params: PyTree, inputs: Inputs, segments: Array | None = None) -> None:
        """There is no encoder."""

    def first(self, inputs: Inputs) -> Rows:
        """The last token of each prompt: [B]."""
        last = (inputs != PADDING).sum(axis=1, dtype=jnp.int32) - 1
        return jnp.take_along_axis(inputs, last[:, None], axis=1)[:, 0]

    def start(
        self, params: PyTree, inputs: Inputs, cache_length: int, encoded: Array | None = None
    ) -> PromptedState:
        """Reads prompts [B, S] of at least one token, -1 filling them up, but for their last.

        Returns a state with room for `cache_length` tokens a row behind its prompt.
        """
        del encoded
        return self._apply(params, inputs, cache_length, method="start")
