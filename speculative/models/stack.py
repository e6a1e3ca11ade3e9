"""The stack of layers that encoders and decoders of all families share, and a decoder's state."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import Array

from speculative.backends import PREPACKED, Cache, Norm, Xla, look_up
from speculative.models.config import Config
from speculative.models.interface import Chunk
from speculative.models.layers import Dense, Layer, LayerNorm, RelativeBias, Source
from speculative.models.positions import branching_bias, causal_bias
from speculative.ragged import read_rows
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
    source_bias: Array | None = None  # [B, 1, 1, S] float32, 0 at tokens and -1e10 at padding.


def caches(keys: Sequence[Array], values: Sequence[Array], starts: Rows, count: int) -> list[Cache]:
    """Each layer's cache, which `count` new positions enter at starts [B]."""
    return [Cache(*layer, starts, count) for layer in zip(keys, values, strict=True)]


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with positions, last norm and a decoder's logits."""

    config: Config
    backend: Xla
    depth: int
    kind: str = "decoder"  # Or "encoder".
    layer: Callable[..., nn.Module] = Layer  # Of config, backend and kind: what the family stacks.

    def setup(self) -> None:
        """Declares the stack under T5X's names."""
        config, encoder = self.config, self.kind == "encoder"
        if config.positions == "learned":
            init = nn.initializers.normal(0.01)
            sizes = config.max_positions, config.emb_dim
            self.position_embedder = nn.Embed(*sizes, embedding_init=init)
        elif config.shared_positions:
            self.relpos_bias = RelativeBias(config, bidirectional=encoder)
        self.layers = [self.layer(config, self.backend, self.kind) for _ in range(self.depth)]
        self.norm = LayerNorm(config, name=f"{self.kind}_norm")
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))
        if not encoder and not config.logits_via_embedding:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
            self.logits_dense = Dense(config.emb_dim, config.logits, init)

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
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
        for layer, bias, source, cache in itertools.zip_longest(
            self.layers, biases, sources, caches
        ):
            outputs.append(layer(x, bias, train, source, cache))
            x = outputs[-1][0]
        return tuple(zip(*outputs, strict=True))

    def _biases(
        self, length: int, mask: Array | None, caches: Sequence[Cache], chunk: Chunk | None
    ) -> list[Array]:
        """What each layer's self-attention adds to its scores: relative positions and the mask."""
        if self.config.shared_positions:
            tables = [None if self.config.positions == "learned" else self.relpos_bias]
        else:
            tables = [layer.relative_posemb for layer in self.layers]
        if mask is not None:
            times = mask.shape[-1] // length  # That caches hold the same positions.
            found = [jnp.tile(table(length), times) + mask if table else mask for table in tables]
            return found * (self.depth // len(found))
        room, starts = caches[0].keys.shape[2], caches[0].starts
        none = jnp.zeros((1, room))
        found = [table.by_distance(room) if table else none for table in tables]
        if chunk is None or chunk.mask is None or chunk.positions is None:
            found = [causal_bias(by_distance, starts, length) for by_distance in found]
        else:
            more = (0, 0), (0, length - chunk.positions.shape[1])
            given = jnp.pad(chunk.positions, more), jnp.pad(chunk.mask, (*more, (0, 0)))
            found = [branching_bias(by_distance, starts, *given) for by_distance in found]
        return found * (self.depth // len(found))

    def hidden(self, after: Sequence[Array], wanted: tuple[str, ...]) -> dict[str, Array]:
        """Those wanted of the hidden states after each layer and the last norm."""
        hidden = {f"decoder/layers_{i}": x for i, x in enumerate(after)}
        if LAST in wanted:
            hidden[LAST] = self.norm.numbers(after[-1])
        return {name: hidden[name] for name in wanted}


class Transformer(nn.Module):
    """An embedding and a decoder; a family adds how texts begin."""

    config: Config
    backend: Xla = Xla()  # What computes with the parameters.

    def declare(self, deviation: float, layer: Callable[..., nn.Module]) -> None:
        """Declares both; `deviation` is the embedding's initial one, `layer` is `Stack.layer`."""
        config, init = self.config, nn.initializers.normal(deviation)
        self.token_embedder = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
        self.decoder = Stack(config, self.backend, config.decoder_layers, layer=layer)

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
        bias = state.source_bias
        sources = [Source(*cross, bias) for cross in state.cross if bias is not None]
        remembered = caches(state.keys, state.values, starts, length)
        after, keys, values = self.decoder(x, sources=sources, caches=remembered, chunk=chunk)
        lengths = state.lengths + length
        state = dataclasses.replace(state, lengths=lengths, keys=keys, values=values)
        x = after[-1] if at is None else self._filled(read_rows(after[-1], at, 1))
        logits = self.logits(x, self.decoder.norm.numbers)[:, : length if at is None else 1]
        after = [x[:, :length] for x in after]
        return logits, state, self.decoder.hidden(after, layers)

    def _filled(self, x: Array) -> Array:
        """A chunk [B, L, D] with as many positions, the others 0, as the backend computes best."""
        batch, length, _ = x.shape
        width = self.backend.width(batch, length)
        return jnp.pad(x, ((0, 0), (0, width - length), (0, 0))) if width > length else x

    def embed(self, tokens: Tokens, positions: Array | None = None) -> Array:
        """Tokens [B, L], with learned positions [B or 1, L] if there are such: [B, L, D]."""
        x = look_up(self.token_embedder.embedding, tokens).astype(self.config.dtype)
        if self.config.positions != "learned" or positions is None:
            return x
        # A last step may guess beyond the last position; unclipped, such keys would be NaN.
        positions = jnp.minimum(positions, self.config.max_positions - 1)
        return x + look_up(self.decoder.position_embedder.embedding, positions).astype(x.dtype)

    def logits(self, x: Array, norm: Norm | None = None) -> Logits:
        """[B, L, V] float32 of x [B, L, D], normed first where a norm is given."""
        if self.config.logits_via_embedding:
            prepacked = self.get_variable(PREPACKED, "logits")
            return self.backend.tied(x, self.token_embedder.embedding, prepacked, norm)
        projection = self.decoder.logits_dense.projection
        return self.backend.product(x, projection, norm, out_dtype="float32")
