"""Decoders that may read another model's hidden states: drafts that read those of their target."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from speculative.backends import Xla
from speculative.models.config import Config
from speculative.models.interface import Chunk
from speculative.models.layers import Dense, LayerNorm, Source
from speculative.models.positions import positions_in, same_segment, shifted
from speculative.models.stack import DecoderState, Transformer, caches
from speculative.types import Logits, Segments, Tokens


class Reading(nn.Module):
    """A hidden state of so many features, normed, projected and added to a token's embedding."""

    config: Config
    backend: Xla
    features: int

    def setup(self) -> None:
        """Declares norm and projection."""
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.norm = LayerNorm(self.config.replace(emb_dim=self.features))
        self.dense = Dense(self.features, self.config.emb_dim, init)

    def __call__(self, hidden: Array, embedded: Array) -> Array:
        """[B, L, features] and [B, L, D] -> [B, L, D]."""
        hidden, norm = hidden.astype(self.config.dtype), self.norm.numbers
        return embedded + self.backend.product(hidden, self.dense.projection, norm)


class Reader(Transformer):
    """With `Reads.target_layers`, reads each token with a hidden state of the position before it.

    That is the target's or, where it is not known yet, this decoder's own. Before the first token
    both are zero. (EAGLE, Li et al. 2024, arXiv 2401.15077; several layers as in EAGLE-3.)
    """

    def declare(self, deviation: float, layer: Callable[..., nn.Module]) -> None:
        """See `Transformer`."""
        super().declare(deviation, layer)
        if self.config.reads.target_layers:
            self.reads_target = Reading(self.config, self.backend, self.config.reads.hidden_dim)
            self.reads_itself = Reading(self.config, self.backend, self.config.emb_dim)

    def read_on(
        self, state: DecoderState, tokens: Tokens, hidden: Array | None, own: Array | None
    ) -> tuple[Logits, DecoderState, Array]:
        """A chunk [B, L] with hidden states of the positions before it; see `FlaxModel`."""

        def read(embedded: Array) -> Array:
            if hidden is not None:
                return self.reads_target(hidden, embedded)
            assert own is not None, "a token is read with a hidden state"
            return self.reads_itself(own, embedded)

        last = f"decoder/layers_{self.config.decoder_layers - 1}"
        logits, state, found = self.extend(state, Chunk(tokens), None, (last,), read)
        return logits, state, found[last]

    def unroll(
        self, tokens: Tokens, segments: Segments, encoded: Array, hidden: Array, guesses: int
    ) -> list[Logits]:
        """Teacher-forced logits [B, L, V] of each guess of a step, as the draft will compute them.

        Those of guess k at position l know the target's hidden states [B, L, F] of positions before
        l - k; for the k positions after these there are the draft's own, of guesses 0 to k - 1.
        (The training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2.)
        """
        target = jnp.ones_like(tokens) if segments is None else segments[1]
        sources = self.sources(encoded, segments, tokens)
        embedded, (_, length) = self.embed(tokens, positions_in(target)), tokens.shape
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        x = self.reads_target(shifted(hidden, target), embedded)
        mask = same_segment(target, target, back >= 0)
        after, *known = self.decoder(x, mask, False, sources)
        logits = [self.logits(after[-1], self.decoder.norm.numbers)]
        for k in range(1, guesses):
            x = self.reads_itself(shifted(after[-1], target), embedded)
            # Keys of guess j, of the one position that it was made for; before, those of guess 0.
            seen = [back >= k, *(back == k - j for j in range(1, k + 1))]
            mask = jnp.concatenate([same_segment(target, target, s) for s in seen], axis=-1)
            starts = jnp.full(len(tokens), k * length)
            room = (0, 0), (0, 0), (0, length), (0, 0)
            known = [[jnp.pad(y, room) for y in each] for each in known]
            given = caches(*known, starts, length)
            after, *known = self.decoder(x, mask, False, sources, given)
            logits.append(self.logits(after[-1], self.decoder.norm.numbers))
        return logits

    def sources(self, encoded: Array, segments: Segments, tokens: Tokens) -> list[Source]:
        """What whole texts attend to beside themselves; a family may have something."""
        return []
