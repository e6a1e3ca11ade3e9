"""Encoder-decoders of all families: inputs are source texts that outputs attend to."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from speculative.models.flax_model import FlaxModel
from speculative.models.interface import Started
from speculative.models.layers import Layer, Source
from speculative.models.positions import masked, positions_in, same_segment
from speculative.models.stack import DecoderState, Stack
from speculative.models.transformer import Transformer
from speculative.types import PADDING, Inputs, Logits, Rows, Segments, Tokens


class EncoderDecoder(Transformer):
    """Encoder and decoder, usually with one embedding; the root of T5X's parameter tree."""

    def setup(self) -> None:
        """Declares embedding and stacks."""
        config = self.config.of_encoder
        source_dim = self.config.reads.source_dim or config.emb_dim
        source_dim = 0 if self.config.merges_source else source_dim
        self.declare(1.0, functools.partial(Layer, source_dim=source_dim))
        if not self.config.reads.source_dim:
            depth, embeds = config.encoder_layers, config is not self.config
            self.encoder = Stack(config, self.backend, depth, "encoder", embeds=embeds)

    def encode(self, inputs: Inputs, segments: Array | None = None, train: bool = False) -> Array:
        """Inputs [B, S] -> [B, S, D]; see `FlaxModel.encode`."""
        mask = _padding(inputs) if segments is None else same_segment(segments, segments)
        seen = inputs != PADDING if segments is None else segments > 0
        # Padding is zeroed: nothing uses its outputs, and kernels on CPU skip it.
        owner = self.encoder if self.encoder.embeds else self
        x = jnp.where(seen[..., None], self.embedded(owner.token_embedder, inputs), 0)
        positions = (
            jnp.arange(inputs.shape[1])[None] if segments is None else positions_in(segments)
        )
        after, _, _ = self.encoder(x, mask, train, positions=positions)
        return self.encoder.dropout(self.encoder.norm.numbers(after[-1]), not train)

    def __call__(
        self, inputs, decoder_inputs, segments, train, encoded, layers
    ) -> tuple[Logits, dict[str, Array]]:
        """Teacher-forced logits and hidden states; see `FlaxModel.forward_with_hidden`."""
        source, target = segments or (None, jnp.ones_like(decoder_inputs))
        causal = jnp.tril(jnp.ones((decoder_inputs.shape[1],) * 2, bool))
        if encoded is None:
            encoded = self.encode(inputs, source, train)
        bias = _padding(inputs) if source is None else same_segment(target, source)
        sources = [Source(*cross, bias) for cross in self._project(encoded)]
        mask = same_segment(target, target, causal)
        embedded, positions = self.embed(decoder_inputs), positions_in(target)
        after, _, _ = self.decoder(embedded, mask, train, sources, positions=positions)
        logits = self.logits(self.decoder.dropout(self.decoder.norm.numbers(after[-1]), not train))
        return logits, self.decoder.hidden(after, layers)

    def sources(self, encoded: Array, segments: Segments, tokens: Tokens) -> list[Source]:
        """Each layer's keys and values of the source; without `segments`, nothing is padding."""
        source, target = segments or (jnp.ones(encoded.shape[:2]), jnp.ones_like(tokens))
        bias = same_segment(target, source)
        return [Source(*cross, bias) for cross in self._project(encoded)]

    def start(
        self, inputs: Inputs, cache_length: int, encoded: Array | None, layers: tuple[str, ...]
    ) -> Started:
        """Encodes inputs [B, S] (-1 = padding) and projects the source's keys and values once."""
        config = self.config
        encoded = self.encode(inputs) if encoded is None else encoded
        lengths, cross = jnp.zeros(inputs.shape[0], jnp.int32), self._project(encoded)
        if config.merges_source:  # The caches begin with it.
            room = (0, 0), (0, 0), (0, cache_length), (0, 0)
            keys, values = zip(*jax.tree.map(lambda x: jnp.pad(x, room), cross), strict=True)
            cross = ()
        else:
            sizes = inputs.shape[0], config.kv_heads, cache_length, config.head_dim
            shape = self.backend.cache_shape(*sizes)
            keys = values = (jnp.zeros(shape, config.dtype),) * config.decoder_layers
        bias = _padding(inputs)
        state = DecoderState(lengths, keys, values, cross=cross, source_bias=bias)
        return Started(state, dict.fromkeys(layers, encoded))

    def _project(self, encoded: Array) -> tuple[tuple[Array, Array], ...]:
        """Each layer's keys and values [B, K, S, H] of an encoded source [B, S, D]."""
        encoded = encoded.astype(self.config.dtype)
        if self.config.merges_source:
            return tuple(layer.attend.of_source(encoded) for layer in self.decoder.layers)
        crosses = [layer.encoder_decoder_attention for layer in self.decoder.layers]
        each = [dense.projection for cross in crosses for dense in (cross.key, cross.value)]
        by_head = self.backend.of_source(encoded, each, self.config.kv_heads)
        return tuple(zip(by_head[::2], by_head[1::2], strict=True))


def _padding(inputs: Inputs) -> Array:
    """The mask [B, 1, 1, S] that hides a source's padding."""
    return masked(inputs != PADDING)[:, None, None, :]


class Seq2Seq(FlaxModel):
    """An encoder-decoder of a given configuration, as pure functions on explicit parameters."""

    pad_id: ClassVar[int] = PADDING
    decoder_only: ClassVar[bool] = False
    root = EncoderDecoder

    def first(self, inputs: Inputs) -> Rows:
        """The start token of each row: [B]."""
        return jnp.full(inputs.shape[0], self.start_id, jnp.int32)
