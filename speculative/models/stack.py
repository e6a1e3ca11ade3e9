"""The stack of layers that encoders and decoders of all families share, and a decoder's state."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.backends import PREPACKED, Cache, Dropout, Xla, backend_of, look_up
from speculative.models.config import Config
from speculative.models.interface import Chunk
from speculative.models.layers import (
    MASKED,
    Attention,
    Dense,
    LayerNorm,
    Mlp,
    Reading,
    RelativeBias,
    Source,
    masked,
    same_segment,
    shifted,
)
from speculative.ragged import read_rows, write_rows
from speculative.types import Logits, Rows, Tokens

LAST = "decoder/decoder_norm"  # The name of the hidden states that logits are computed from.


@struct.dataclass
class DecoderState:
    """What a decoder remembers between chunks.

    Heads come before positions, so that attention is one batched product and the cache is never
    transposed. A backend may hold all heads as one, of their sizes together.
    """

    lengths: Rows  # Tokens in each row's cache, a prompt's not counted; what follows is masked.
    keys: tuple[Array, ...]  # Of each layer's self-attention, [B, N, T, H].
    values: tuple[Array, ...]
    # Tokens of the prompt in the cache: all but its last, which is fed first. None with a source.
    prompt: Rows | None = None
    cross: tuple[tuple[Array, Array], ...] = ()  # Each layer's keys and values of the source.
    source_bias: Any = None  # [B, 1, 1, S] float32, 0 at tokens and -1e10 at padding.


class Layer(nn.Module):
    """Self-attention, attention to a source, feed-forward, each normed before and added after."""

    config: Config
    kind: str = "decoder"  # Or "encoder", of the stack.
    crosses: bool = False  # Whether there is attention to a source.

    def setup(self) -> None:
        """Declares the layer's parts under T5X's names."""
        config, encoder = self.config, self.kind == "encoder"
        attention = "attention" if encoder else "self_attention"
        self.attention_norm = LayerNorm(config, name=f"pre_{attention}_layer_norm")
        self.attend = Attention(config, name=attention)
        if not config.shared_positions:
            self.relative_posemb = RelativeBias(config, bidirectional=encoder)
        if self.crosses:
            self.pre_cross_attention_layer_norm = LayerNorm(config)
            self.encoder_decoder_attention = Attention(config)
        self.pre_mlp_layer_norm = LayerNorm(config)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))

    def __call__(
        self, x: Array, bias: Array, dropout: Dropout, source: Source | None, cache: Cache | None
    ) -> tuple[Array, Array, Array]:
        """[B, L, D] -> [B, L, D], and keys and values [B, N, L or T, H] of self-attention."""
        x, keys, values = self.attend(x, self.attention_norm, bias, dropout, cache)
        if source is not None:
            norm = self.pre_cross_attention_layer_norm
            x = self.encoder_decoder_attention.cross(x, norm, source, dropout)
        return self.mlp(x, self.pre_mlp_layer_norm, dropout), keys, values


def positions_in(segments: Array) -> Array:
    """Each position [B, L] of packed texts, counted from the beginning of its own."""
    index = jnp.arange(segments.shape[1])
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)


def causal_bias(by_distance: Array, starts: Array, length: int) -> Array:
    """Bias and causal mask [B, N or 1, L, T] of L queries from positions starts [B] on.

    `by_distance` [N or 1, T], float32, has the bias of keys T - 1, ..., 0 positions back.
    """
    # Every row of the bias is a window on one table over distances, descending from T - 1 to 0
    # and then masked. All rows lie in one slice of it, that of each query one to the left of the
    # one before: copies of the slice in rows shorter by one shift it so, in a single operation.
    # Queries that only fill a chunk up may lie beyond the cache; what they see does not matter.
    heads, cache = by_distance.shape
    table = jnp.pad(by_distance, ((0, 0), (length, cache)), constant_values=MASKED)
    size = cache + length

    def window(start: Array) -> Array:
        seen = lax.dynamic_slice_in_dim(table, cache - start, size, axis=1)
        rows = jnp.tile(seen, length)[:, : length * (size - 1)].reshape(heads, length, size - 1)
        return rows[..., length - 1 :]

    return jax.vmap(window)(starts) if starts.shape[0] > 1 else window(starts[0])[None]


def branching_bias(by_distance: Array, starts: Array, positions: Array, mask: Array) -> Array:
    """Likewise of a chunk that branches (`interface.Chunk`), whose keys are in the cache.

    `positions` [B or 1, Q] are those of the queries; `mask` [B or 1, Q, L], Q >= L, is of the
    chunk's keys, which the first L queries belong to.
    """
    batch, cache = starts.shape[0], by_distance.shape[1]
    queries = starts[:, None] + positions
    seen = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
    index = jnp.broadcast_to(jnp.arange(cache), (batch, cache))
    keys = write_rows(index, queries[:, : mask.shape[2]], starts, axis=1)
    before = jnp.broadcast_to((index < starts[:, None])[:, None], (*queries.shape, cache))
    distance = queries[..., None] - keys[:, None]
    bias = by_distance[:, cache - 1 - jnp.clip(distance, 0, cache - 1)].swapaxes(0, 1)
    return bias + masked(write_rows(before, seen, starts, axis=2))[:, None]


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with positions, last norm and a decoder's logits."""

    config: Config
    kind: str = "decoder"  # Or "encoder".
    crosses: bool = False  # Whether layers attend to a source.

    def setup(self) -> None:
        """Declares the stack under T5X's names."""
        config, encoder = self.config, self.kind == "encoder"
        if config.positions == "learned":
            init = nn.initializers.normal(0.01)
            sizes = config.max_positions, config.emb_dim
            self.position_embedder = nn.Embed(*sizes, embedding_init=init)
        elif config.shared_positions:
            self.relpos_bias = RelativeBias(config, bidirectional=encoder)
        depth = getattr(config, config.depths[0 if encoder else -1])
        self.layers = [Layer(config, self.kind, self.crosses) for _ in range(depth)]
        self.norm = LayerNorm(config, name=f"{self.kind}_norm")
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))
        if not encoder and not config.logits_via_embedding:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
            self.logits_dense = Dense(config.logits, config.dtype, init, out_dtype="float32")

    def __call__(
        self,
        x: Array,
        mask: Any = None,
        train: bool = False,
        sources: Sequence[Source] = (),
        caches: Sequence[Cache] = (),
        chunk: Chunk | None = None,
    ) -> tuple[tuple[Array, ...], ...]:
        """Whole texts x [B, L, D] under a mask [B or 1, 1, L or 1, L], or chunks that enter caches.

        Whole texts may enter caches too, in which they are several times, under a mask of those.
        Gives [B, L, D] after each layer, and each layer's keys and values, [B, N, L, H] or caches.
        """
        biases = self._biases(x.shape[1], mask, caches, chunk)
        x, outputs = self.dropout(x, not train), []
        each = itertools.zip_longest(self.layers, biases, sources, caches)
        for layer, bias, source, cache in each:
            active = functools.partial(layer.dropout, deterministic=False) if train else None
            outputs.append(layer(x, bias, active, source, cache))
            x = outputs[-1][0]
        return tuple(zip(*outputs, strict=True))

    @property
    def backend(self) -> Xla:
        """What computes the layers."""
        return self.layers[0].attend.out.backend

    def _biases(
        self, length: int, mask: Any, caches: Sequence[Cache], chunk: Chunk | None
    ) -> list[Array]:
        """What each layer's self-attention adds to its scores: relative positions and the mask."""
        if self.config.shared_positions:
            tables = [None if self.config.positions == "learned" else self.relpos_bias]
        else:
            tables = [layer.relative_posemb for layer in self.layers]
        if caches and mask is None:
            room, starts = caches[0][0].shape[2], caches[0][2]
            none = jnp.zeros((1, room))
            found = [table.by_distance(room) if table else none for table in tables]
            if chunk is None or chunk.mask is None or chunk.positions is None:
                found = [causal_bias(by_distance, starts, length) for by_distance in found]
            else:
                more = (0, 0), (0, length - chunk.positions.shape[1])
                given = jnp.pad(chunk.positions, more), jnp.pad(chunk.mask, (*more, (0, 0)))
                found = [branching_bias(by_distance, starts, *given) for by_distance in found]
        else:
            times = mask.shape[-1] // length  # That caches hold the same positions.
            found = [jnp.tile(table(length), times) + mask if table else mask for table in tables]
        return found * (len(self.layers) // len(found))

    def hidden(self, after: Sequence[Array], wanted: tuple[str, ...]) -> dict[str, Array]:
        """Those wanted of the hidden states after each layer and the last norm."""
        hidden = {f"decoder/layers_{i}": x for i, x in enumerate(after)}
        if LAST in wanted:
            hidden[LAST] = self.norm(after[-1])
        return {name: hidden[name] for name in wanted}


class Transformer(nn.Module):
    """An embedding and a decoder; a family adds how texts begin.

    With `Config.target_layers` a token is read together with a hidden state of the position before
    it: the target's or, where that is not known yet, this decoder's own. Before the first token
    both are zero. (EAGLE, Li et al. 2024, arXiv 2401.15077; several layers as in EAGLE-3.)
    """

    config: Config

    def declare(self, deviation: float, crosses: bool = False) -> None:
        """Declares both; `deviation` is the embedding's initial one, the others are `Stack`'s."""
        config, init = self.config, nn.initializers.normal(deviation)
        self.token_embedder = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
        self.decoder = Stack(config, crosses=crosses)
        if config.target_layers:
            self.reads_target = Reading(config, config.hidden_dim)
            self.reads_itself = Reading(config, config.emb_dim)

    def extend(
        self,
        state: DecoderState,
        chunk: Chunk,
        at: Rows | None,
        layers: tuple[str, ...],
        read: Callable[[Array], Array] = lambda x: x,
    ) -> tuple[Logits, DecoderState, dict[str, Array]]:
        """A chunk; see `interface.Model.extend`. `read` may add to its embedding [B, L, D]."""
        length = chunk.tokens.shape[1]
        starts = state.lengths if state.prompt is None else state.prompt + state.lengths
        behind = jnp.arange(length) if chunk.positions is None else chunk.positions
        x = self._filled(read(self.embed(chunk.tokens, starts[:, None] + behind)))
        sources = [(keys, values, state.source_bias) for keys, values in state.cross]
        caches = [(*cache, starts, length) for cache in zip(state.keys, state.values, strict=True)]
        after, keys, values = self.decoder(x, sources=sources, caches=caches, chunk=chunk)
        lengths = state.lengths + length
        state = dataclasses.replace(state, lengths=lengths, keys=keys, values=values)
        x = after[-1] if at is None else self._filled(read_rows(after[-1], at, 1))
        logits = self.logits(x, self.decoder.norm)[:, : length if at is None else 1]
        after = [x[:, :length] for x in after]
        return logits, state, self.decoder.hidden(after, layers)

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
        self, tokens: Tokens, segments: Any, encoded: Array, hidden: Array, guesses: int
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
        after, *caches = self.decoder(x, mask, False, sources)
        logits = [self.logits(after[-1], self.decoder.norm)]
        for k in range(1, guesses):
            x = self.reads_itself(shifted(after[-1], target), embedded)
            # Keys of guess j, of the one position that it was made for; before, those of guess 0.
            seen = [back >= k, *(back == k - j for j in range(1, k + 1))]
            mask = jnp.concatenate([same_segment(target, target, s) for s in seen], axis=-1)
            starts = jnp.full(len(tokens), k * length)
            caches = [
                [jnp.pad(y, ((0, 0), (0, 0), (0, length), (0, 0))) for y in each] for each in caches
            ]
            given = [(*cache, starts, length) for cache in zip(*caches, strict=True)]
            after, *caches = self.decoder(x, mask, False, sources, given)
            logits.append(self.logits(after[-1], self.decoder.norm))
        return logits

    def sources(self, encoded: Array, segments: Any, tokens: Tokens) -> list[Source]:
        """What whole texts attend to beside themselves; a family may have something."""
        return []

    def _filled(self, x: Array) -> Array:
        """A chunk [B, L, D] with as many positions, the others 0, as the backend computes best."""
        batch, length, _ = x.shape
        width = self.decoder.backend.width(batch, length)
        return jnp.pad(x, ((0, 0), (0, width - length), (0, 0))) if width > length else x

    def embed(self, tokens: Tokens, positions: Array | None = None) -> Array:
        """Tokens [B, L], with learned positions [B or 1, L] if there are such: [B, L, D]."""
        x = look_up(self.token_embedder.embedding, tokens).astype(self.config.dtype)
        if self.config.positions != "learned" or positions is None:
            return x
        # A last step may guess beyond the last position; unclipped, such keys would be NaN.
        positions = jnp.minimum(positions, self.config.max_positions - 1)
        return x + look_up(self.decoder.position_embedder.embedding, positions).astype(x.dtype)

    def logits(self, x: Array, norm: LayerNorm | None = None) -> Logits:
        """[B, L, V] float32 of x [B, L, D], normed first where a norm is given."""
        if not self.config.logits_via_embedding:
            return self.decoder.logits_dense(x, norm)
        prepacked = self.get_variable(PREPACKED, "logits")
        return backend_of(prepacked).tied(prepacked, self.token_embedder.embedding, x, norm)
