"""The module for all families: an embedding and a decoder, which may read its target."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from speculative.backends import PREPACKED, Cache, Norm, Projection, Xla, look_up
from speculative.models.config import Config
from speculative.models.interface import Chunk, Extended
from speculative.models.layers import Dense, LayerNorm, Source
from speculative.models.positions import positions_in, same_segment, shifted
from speculative.models.stack import DecoderState, Stack
from speculative.ragged import read_rows
from speculative.types import Logits, Rows, Segments, Tokens

_LOGITS = "batch", "length", "vocab"  # The axes of logits.


class Reading(nn.Module):
    """Norms and projects a hidden state, and adds it to a token's embedding."""

    config: Config
    backend: Xla
    features: int

    def setup(self) -> None:
        """Declares norm and projection."""
        self.norm = LayerNorm(self.config.replace(emb_dim=self.features))
        self.dense = Dense(self.features, self.config.emb_dim, distribution="normal")

    def __call__(self, hidden: Array, embedded: Array) -> Array:
        """[B, L, features] and [B, L, D] -> [B, L, D]."""
        hidden, norm = hidden.astype(self.config.dtype), self.norm.numbers
        return embedded + self.backend.product(hidden, self.dense.projection, norm)


class Transformer(nn.Module):
    """An embedding and a decoder; subclasses add `start`.

    With `Reads.target_layers`, each token is read with a hidden state of the position before it:
    the target's or, where it is not known yet, this decoder's own. Before the first token both are
    zero. (EAGLE, Li et al. 2024, arXiv 2401.15077; several layers as in EAGLE-3.)
    """

    config: Config
    backend: Xla = Xla()  # Computes with the parameters.

    def declare(self, deviation: float, layer: Callable[..., nn.Module]) -> None:
        """Declares all; `deviation` is the initial embedding's, `layer` is `Stack.layer`."""
        config, init = self.config, nn.initializers.normal(deviation)
        self.token_embedder = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
        embeds = not config.shared_embedding
        self.decoder = Stack(
            config, self.backend, config.decoder_layers, layer=layer, embeds=embeds
        )
        if config.reads.target_layers:
            self.reads_target = Reading(config, self.backend, config.reads.hidden_dim)
            self.reads_itself = Reading(config, self.backend, config.emb_dim)

    def extend(
        self,
        state: DecoderState,
        chunk: Chunk,
        at: Rows | None,
        layers: tuple[str, ...],
        read: Callable[[Array], Array] = lambda x: x,
    ) -> Extended:
        """See `interface.Model.extend`; `read` may add to the chunk's embedding [B, L, D]."""
        length = chunk.tokens.shape[1]
        positions = (state.positions(state.lengths) - chunk.begun)[:, None] + chunk.behind
        x = self._filled(read(self.embed(chunk.tokens, positions)))
        bias = state.source_bias
        sources = [Source(*cross, bias) for cross in state.cross if bias is not None]
        caches = []
        for i, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
            starts = state.entries(state.lengths, self.config.window(i))
            if state.dropped is not None:
                # A row whose prompt has ended may read on, with others whose prompts are longer.
                starts = jnp.minimum(starts, keys.shape[2] - length)
            caches.append(Cache(keys, values, starts, length))
        inputs = {"sources": sources, "caches": caches, "chunk": chunk, "positions": positions}
        after, keys, values = self.decoder(x, **inputs, merged_bias=state.merged_bias)
        lengths = state.lengths + length
        state = dataclasses.replace(state, lengths=lengths, keys=keys, values=values)
        x = after[-1] if at is None else self._filled(read_rows(after[-1], at, 1))
        logits = self.logits(x, self.decoder.norm.numbers)[:, : length if at is None else 1]
        after = [x[:, :length] for x in after]
        return Extended(logits, state, self.decoder.hidden(after, layers))

    def _filled(self, x: Array) -> Array:
        """A chunk [B, L, D], padded with 0 to as many positions as the backend computes best."""
        batch, length, _ = x.shape
        width = self.backend.width(batch, length)
        return jnp.pad(x, ((0, 0), (0, width - length), (0, 0))) if width > length else x

    def embedded(self, table: nn.Embed, tokens: Tokens) -> Array:
        """The rows of a table for tokens [B, L], in the products' type: [B, L, D]."""
        x = look_up(table.embedding, tokens).astype(self.config.dtype)
        if not self.config.scales_embedding:
            return x
        # The scale is rounded to the products' type, as in the models' training.
        return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)

    def embed(self, tokens: Tokens, positions: Array | None = None) -> Array:
        """Embeds decoder tokens [B, L], with learned positions [B or 1, L] if any: [B, L, D]."""
        of_decoder = self if self.config.shared_embedding else self.decoder
        x = self.embedded(of_decoder.token_embedder, tokens)
        if self.config.positions != "learned" or positions is None:
            return x
        # A last step may guess beyond the last position, and prompts are padded beyond it;
        # unclipped, such keys would be NaN.
        positions = jnp.minimum(positions, self.config.max_positions - 1)
        return x + look_up(self.decoder.position_embedder.embedding, positions).astype(x.dtype)

    def logits(self, x: Array, norm: Norm | None = None) -> Logits:
        """Float32 logits [B, L, V] of x [B, L, D], normed first if a norm is given."""
        logits, cap = self._products(x, norm), self.config.logits_cap
        return self.backend.along(cap * jnp.tanh(logits / cap) if cap else logits, *_LOGITS)

    def _products(self, x: Array, norm: Norm | None) -> Logits:
        if self.config.logits_via_embedding:
            embedding = self.token_embedder.embedding
            weight = self.get_variable(PREPACKED, "logits")
            if weight is None:
                return self.backend.tied(x, embedding, norm)
            projection = Projection(weight, (len(embedding),))
        else:
            projection = self.decoder.logits_dense.projection
        return self.backend.product(x, projection, norm, out_dtype="float32")

    def read_on(
        self, state: DecoderState, chunk: Chunk, hidden: Array | None, own: Array | None
    ) -> tuple[Logits, DecoderState, Array]:
        """See `FlaxModel.read_on`: a chunk is read with hidden states of the positions before."""
        before, reads = (own, self.reads_itself) if hidden is None else (hidden, self.reads_target)
        assert before is not None, "a token is read with a hidden state"
        last = f"decoder/layers_{self.config.decoder_layers - 1}"
        logits, state, after = self.extend(state, chunk, None, (last,), lambda x: reads(before, x))
        return logits, state, after[last]

    def unroll(
        self, tokens: Tokens, segments: Segments, encoded: Array, hidden: Array, guesses: int
    ) -> list[Logits]:
        """Teacher-forced logits [B, L, V] of each guess of a step, as the draft will compute them.

        Guess k at position l knows the target's hidden states [B, L, F] of positions before l - k;
        for the k positions after these it knows the draft's own, from guesses 0 to k - 1.
        (The training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2.)
        """
        target = jnp.ones_like(tokens) if segments is None else segments[1]
        sources, positions = self.sources(encoded, segments, tokens), positions_in(target)
        embedded, (_, length) = self.embed(tokens, positions), tokens.shape
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        x = self.reads_target(shifted(hidden, target), embedded)
        mask = same_segment(target, target, back >= 0)
        after, *known = self.decoder(x, mask, False, sources, positions=positions)
        logits = [self.logits(after[-1], self.decoder.norm.numbers)]
        for k in range(1, guesses):
            x = self.reads_itself(shifted(after[-1], target), embedded)
            # Queries see guess 0's keys up to k positions back, then one key of each later guess.
            seen = [back >= k, *(back == k - j for j in range(1, k + 1))]
            mask = jnp.concatenate([same_segment(target, target, s) for s in seen], axis=-1)
            starts = jnp.full(len(tokens), k * length)
            room = (0, 0), (0, 0), (0, length), (0, 0)
            known = [[jnp.pad(y, room) for y in each] for each in known]
            both = zip(*known, strict=True)
            caches = [Cache(keys, values, starts, length) for keys, values in both]
            after, *known = self.decoder(x, mask, False, sources, caches, positions=positions)
            logits.append(self.logits(after[-1], self.decoder.norm.numbers))
        return logits

    def sources(self, encoded: Array, segments: Segments, tokens: Tokens) -> list[Source]:
        """The sources that whole texts attend to, in addition to themselves; by default none."""
        return []
