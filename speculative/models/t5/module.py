"""T5: the Flax module, whose parameters have T5X's names, and the model over it."""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from speculative.models.flax_model import FlaxModel
from speculative.models.layers import Dense, LayerNorm, masked, same_segment
from speculative.models.stack import DecoderState, Stack, Transformer
from speculative.models.t5.config import T5Config
from speculative.types import PAD_ID, Inputs, Logits, PyTree, Rows, Tokens


class Reading(nn.Module):
    """A hidden state of so many features, normed, projected and added to a token's embedding."""

    config: T5Config
    features: int

    def setup(self) -> None:
        """Declares norm and projection."""
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.norm = LayerNorm(self.config.replace(emb_dim=self.features))
        self.dense = Dense(self.config.emb_dim, self.config.dtype, init)

    def __call__(self, hidden: Array, embedded: Array) -> Array:
        """[B, L, features] and [B, L, D] -> [B, L, D]; a hidden state of zeros adds nothing."""
        return self.dense(hidden.astype(self.config.dtype), self.norm, add=embedded)


class EncoderDecoder(Transformer):
    """Encoder and decoder over one embedding; the root of T5X's parameter tree.

    With `T5Config.target_layers` a token is read together with a hidden state of the position
    before it: the target's, or where that is not known yet, this decoder's own. Before the first
    token both are zero. (EAGLE, Li et al. 2024, arXiv 2401.15077; several layers as in EAGLE-3.)
    """

    def setup(self) -> None:
        """Declares embedding and stacks."""
        self.declare(1.0, crosses=True)
        if not self.config.source_dim:
            self.encoder = Stack(self.config, "encoder")
        if layers := self.config.target_layers:
            self.reads_target = Reading(self.config, len(layers) * self.config.source_dim)
            self.reads_itself = Reading(self.config, self.config.emb_dim)

    def encode(self, inputs: Inputs, segments: Array | None = None, train: bool = False) -> Array:
        """Inputs [B, S] -> [B, S, D]; see `FlaxModel.encode`."""
        mask = _padding(inputs) if segments is None else same_segment(segments, segments)
        after, _, _ = self.encoder(self.embed(inputs), mask, train)
        return self.encoder.dropout(self.encoder.norm(after[-1]), not train)

    def __call__(
        self,
        inputs: Array,
        decoder_inputs: Array,
        segments: Any,
        train: bool,
        encoded: Any,
        layers: tuple[str, ...] = (),
    ) -> tuple[Logits, dict[str, Array]]:
        """Teacher-forced logits and hidden states; see `FlaxModel.forward_with_hidden`."""
        if self.config.target_layers:
            x = jnp.zeros((*decoder_inputs.shape, self.reads_target.features))
            return self.unroll(decoder_inputs, segments, encoded, x, 2)[0], {}
        source, target = segments or (None, jnp.ones_like(decoder_inputs))
        causal = jnp.tril(jnp.ones((decoder_inputs.shape[1],) * 2, bool))
        if encoded is None:
            encoded = self.encode(inputs, source, train)
        bias = _padding(inputs) if source is None else same_segment(target, source)
        sources = [(keys, values, bias) for keys, values in self._project(encoded)]
        mask = same_segment(target, target, causal)
        after, _, _ = self.decoder(self.embed(decoder_inputs), mask, train, sources)
        logits = self.logits(self.decoder.dropout(self.decoder.norm(after[-1]), not train))
        return logits, self.decoder.hidden(after, layers)

    def unroll(
        self, tokens: Tokens, segments: Any, encoded: Array, hidden: Array, guesses: int
    ) -> list[Logits]:
        """Teacher-forced logits [B, L, V] of each guess of a step, as the draft will compute them.

        Those of guess k at position l know the target's hidden states [B, L, F] of positions before
        l - k; for the k positions after these there are the draft's own, of guesses 0 to k - 1.
        (The training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2.)
        """
        source, target = segments or (jnp.ones(encoded.shape[:2]), jnp.ones_like(tokens))
        sources = [(*cross, same_segment(target, source)) for cross in self._project(encoded)]
        embedded, (_, length) = self.embed(tokens), tokens.shape
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        x = self.reads_target(shifted(hidden, target), embedded)
        mask = same_segment(target, target, back >= 0)
        after, *caches = self.decoder(x, mask, False, sources)
        logits = [self.logits(after[-1], self.decoder.norm)]
        for k in range(1, guesses):
            x = self.reads_itself(shifted(after[-1], target), embedded)
            # Keys of guess j, of the one position that it was made for; before, those of guess 0.
            seen = [back >= k, *(back == k - j for j in range(1, k + 1))]
            mask = jnp.concatenate([same_segment(target, target, s) for s in seen], axis=-1)
            starts = jnp.full(len(tokens), k * length)
            caches = [[jnp.pad(y, ((0, 0), (0, length), (0, 0))) for y in each] for each in caches]
            given = [(*cache, starts, length) for cache in zip(*caches, strict=True)]
            after, *caches = self.decoder(x, mask, False, sources, given)
            logits.append(self.logits(after[-1], self.decoder.norm))
        return logits

    def read_on(
        self, state: DecoderState, tokens: Tokens, hidden: Array | None, own: Array | None
    ) -> tuple[Logits, DecoderState, Array]:
        """A chunk [B, L] with hidden states of the positions before its tokens; see `T5.read_on`."""

        def read(embedded: Array) -> Array:
            if hidden is None:
                return self.reads_itself(own, embedded)
            return self.reads_target(hidden, embedded)

        last = f"decoder/layers_{self.config.num_decoder_layers - 1}"
        logits, state, found = self.extend(state, tokens, None, (last,), read)
        return logits, state, found[last]

    def start(
        self, inputs: Inputs, cache_length: int, encoded: Array | None, layers: tuple[str, ...]
    ) -> tuple[DecoderState, dict[str, Array]]:
        """Encodes inputs [B, S] (0 = padding) and projects keys and values of the source once."""
        config = self.config
        encoded, cross = self._read(inputs) if encoded is None else (encoded, self._project(encoded))
        sizes = inputs.shape[0], config.num_heads, cache_length, config.head_dim
        shape = self.decoder.backend.cache_shape(*sizes)
        empty = tuple(jnp.zeros(shape, config.dtype) for _ in range(config.decoder_layers))
        lengths, bias = jnp.zeros(inputs.shape[0], jnp.int32), _padding(inputs)
        state = DecoderState(lengths, empty, empty, cross=cross, source_bias=bias)
        return state, dict.fromkeys(layers, encoded)

    def logits(self, x: Array, norm: LayerNorm | None = None) -> Logits:
        """As of `Transformer`; T5 scales logits that are tied to the embedding."""
        logits = super().logits(x, norm)
        return logits * self.config.emb_dim**-0.5 if self.config.logits_via_embedding else logits

    def _read(self, inputs: Inputs) -> tuple[Array, tuple[tuple[Array, Array], ...]]:
        """Inputs [B, S] encoded, and projected, without padding that costs time; 0 in its place."""
        whole = inputs.shape[1]
        width = self.decoder.backend.shorter(whole)

        def read(size: int, module: "EncoderDecoder", inputs: Inputs) -> Any:
            encoded = module.encode(inputs[:, :size])
            found = encoded, module._project(encoded)
            return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, whole - size), (0, 0))), found)

        if width == whole:
            return read(whole, self, inputs)
        short = (inputs[:, width:] == PAD_ID).all()
        ways = (functools.partial(read, size) for size in (width, whole))
        return nn.cond(short, *ways, self, inputs)

    def _project(self, encoded: Array) -> tuple[tuple[Array, Array], ...]:
        """Each layer's keys and values [B * N, S, H] of a source encoded [B, S, D]."""
        config, crosses = self.config, [x.encoder_decoder_attention for x in self.decoder.layers]
        denses = [dense for cross in crosses for dense in (cross.key, cross.value)]
        heads = denses[0].backend.heads(denses, encoded, config.num_heads)
        heads = [y.astype(config.dtype) for y in heads]
        return tuple(zip(heads[::2], heads[1::2], strict=True))


def shifted(x: Array, segments: Array) -> Array:
    """Of each position of x [B, L, ...] what is at the one before it; 0 where a text begins."""
    same = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    before = jnp.roll(x, 1, axis=1)
    return jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), before, 0)


def _padding(inputs: Inputs) -> Array:
    """The mask [B, 1, 1, S] of a source."""
    return masked(inputs != PAD_ID)[:, None, None, :]


@dataclasses.dataclass(frozen=True)
class T5(FlaxModel):
    """A T5 of a given configuration, as pure functions on explicit parameters."""

    config: T5Config
    pad_id: ClassVar[int] = PAD_ID
    decoder_only: ClassVar[bool] = False
    root = EncoderDecoder

    def first(self, inputs: Inputs) -> Rows:
        """The start token of each row: [B]."""
        return jnp.full(inputs.shape[0], PAD_ID, jnp.int32)

    def unroll(
        self,
        params: PyTree,
        tokens: Tokens,
        segments: tuple[Array, Array] | None,
        encoded: Array,
        hidden: Array,
        guesses: int,
    ) -> list[Logits]:
        """As of `EncoderDecoder`, for training a draft with `T5Config.target_layers`."""
        return self._apply(params, tokens, segments, encoded, hidden, guesses, method="unroll")

    def read_on(
        self,
        params: PyTree,
        state: DecoderState,
        tokens: Tokens,
        hidden: Array | None = None,
        own: Array | None = None,
    ) -> tuple[Logits, DecoderState, Array]:
        """Appends a chunk [B, L], as `extend`, where there are `T5Config.target_layers`.

        Each token is read with the target's hidden states [B, L, F] of the position before it,
        those of all layers side by side, or with this model's own [B, L, D]. Gives logits
        [B, L, V], the state, and this model's own hidden states [B, L, D].
        """
        return self._apply(params, state, tokens, hidden, own, method="read_on")
