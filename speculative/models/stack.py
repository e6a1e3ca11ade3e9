"""The stack of layers that encoders and decoders of all families share, and a decoder's state."""

import itertools
from collections.abc import Callable, Hashable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from speculative.backends import Attending, Cache, Xla
from speculative.models.config import Config
from speculative.models.interface import Chunk
from speculative.models.layers import Dense, Layer, LayerNorm, RelativeBias, Source
from speculative.models.positions import beside, branching_bias, causal_bias, masked
from speculative.types import Rows

LAST = "decoder/decoder_norm"  # The name of the hidden states that logits are computed from.


@struct.dataclass
class DecoderState:
    """The state that a decoder keeps between chunks.

    Heads come before positions, so that attention is one batched product and the cache is never
    transposed. A backend may hold all heads as one, of their total size.
    """

    lengths: Rows  # Tokens in each row's cache, without a prompt's; the rest is masked.
    keys: tuple[Array, ...]  # One per layer, for self-attention: [B, K, T, H].
    values: tuple[Array, ...]
    # Tokens of the prompt in the cache: all but its last, which is fed first. None with a source.
    prompt: Rows | None = None
    # Tokens of a prompt, the first ones, that layers with windows no longer hold: [B].
    dropped: Rows | None = None
    cross: tuple[tuple[Array, Array], ...] = ()  # Each layer's keys and values of the source.
    # [B, 1, 1, S] float32, 0 at tokens and -1e10 at padding. Without `cross`, the caches begin with
    # the source's S keys and values (`Config.merges_source`).
    source_bias: Array | None = None

    @property
    def merged_bias(self) -> Array | None:
        """The bias on a source's keys that the caches begin with, if they do."""
        return None if self.cross else self.source_bias

    def positions(self, lengths: Rows) -> Rows:
        """The positions [B] of what follows `lengths` [B] tokens, which exclude a prompt's."""
        return lengths if self.prompt is None else self.prompt + lengths

    def entries(self, lengths: Rows, window: int) -> Rows:
        """Where the caches of a layer with this window hold what follows `lengths` [B] tokens."""
        entries = self.positions(lengths)
        entries = entries if self.merged_bias is None else entries + self.merged_bias.shape[3]
        return entries - self.dropped if window and self.dropped is not None else entries


class Stack(nn.Module):
    """The layers of an encoder or a decoder, with positions, last norm and a decoder's logits."""

    config: Config
    backend: Xla
    depth: int
    kind: str = "decoder"  # Or "encoder".
    layer: Callable[..., nn.Module] = Layer  # Makes a layer from config, backend and kind.
    embeds: bool = False  # Whether it has its own embedding.

    def setup(self) -> None:
        """Declares the stack under T5X's names."""
        config, encoder = self.config, self.kind == "encoder"
        if config.positions == "learned":
            init = nn.initializers.normal(0.01)
            sizes = config.max_positions, config.emb_dim
            self.position_embedder = nn.Embed(*sizes, embedding_init=init)
        elif config.positions == "relative" and config.shared_positions:
            self.relpos_bias = RelativeBias(config, bidirectional=encoder)
        if self.embeds:
            init = nn.initializers.normal(1.0)
            self.token_embedder = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)
        self.layers = [self.layer(config, self.backend, self.kind) for _ in range(self.depth)]
        self.norm = LayerNorm(config, name=f"{self.kind}_norm")
        self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(1,))
        if not encoder and not config.logits_via_embedding:
            self.logits_dense = Dense(config.emb_dim, config.logits)

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        sources: Sequence[Source] = (),
        caches: Sequence[Cache] = (),
        chunk: Chunk | None = None,
        positions: Array | None = None,
        merged_bias: Array | None = None,
    ) -> tuple[tuple[Array, ...], ...]:
        """Runs whole texts x [B, L, D] under a mask [B or 1, 1, L or 1, L], or chunks with caches.

        Caches may begin with a source's keys, on whose scores `merged_bias` [B, 1, 1, S] is added.
        Whole texts may be read with caches that already hold copies of them; the mask then covers
        all copies. For rotated queries and keys, `positions` [B or 1, up to L] are those of x.
        Returns each layer's output [B, L, D], and its keys and values, [B, K, L, H] or caches.
        """
        specs = self._attending(x.shape[1], mask, caches, chunk, positions, merged_bias)
        x, outputs = self._along(self.dropout(x, not train)), []
        run = _rematerialised(self.backend.remat) if train else None
        for layer, spec, source, cache in itertools.zip_longest(
            self.layers, specs, sources, caches
        ):
            result = (
                layer(x, spec, train, source, cache) if run is None else run(layer, x, spec, source)
            )
            x = self._along(result[0])
            outputs.append((x, *result[1:]))
        return tuple(zip(*outputs, strict=True))

    def _along(self, x: Array) -> Array:
        return self.backend.along(x, "batch", "length", "embed")

    def _attending(
        self,
        length: int,
        mask: Array | None,
        caches: Sequence[Cache],
        chunk: Chunk | None,
        positions: Array | None,
        merged_bias: Array | None,
    ) -> list[Attending]:
        """Each layer's rotation of queries and keys, and the bias on their scores."""
        made: dict[Hashable, Attending] = {}  # Shared by layers that attend alike.
        kinds = []
        for i in range(self.depth):
            own = 0 if self.config.shared_positions else i
            kinds.append((own, self.config.window(i), rope := self.config.rope(i)))
            if kinds[-1] in made:
                continue
            turned = None
            if rope is not None and positions is not None:
                room = (0, 0), (0, length - positions.shape[1])
                turned = rope.rotation(jnp.pad(positions, room), self.config.head_dim)
            if mask is None:
                bias, table = self._bias(i, length, caches[i], chunk, merged_bias), None
            else:
                bias, table = mask, self._by_distance(i, length, length)
            made[kinds[-1]] = Attending(bias, by_distance=table, rotation=turned)
        return [made[kind] for kind in kinds]

    def _bias(
        self, layer: int, length: int, cache: Cache, chunk: Chunk | None, merged_bias: Array | None
    ) -> Array:
        """The bias for a chunk's queries, padded to a length, on a cache: [B, N or 1, L, T]."""
        source = 0 if merged_bias is None else merged_bias.shape[3]
        room, starts = cache.keys.shape[2] - source, cache.starts - source
        by_distance = self._by_distance(layer, room)
        by_distance = jnp.zeros((1, room)) if by_distance is None else by_distance
        if chunk is None or chunk.mask is None or chunk.positions is None:
            bias = causal_bias(by_distance, starts, length)
        else:
            more = (0, 0), (0, length - chunk.tokens.shape[1])
            behind, seen = jnp.pad(chunk.behind, more), jnp.pad(chunk.mask, (*more, (0, 0)))
            text = starts - chunk.begun
            bias = branching_bias(by_distance, text, behind, chunk.positions, seen)
        return bias if merged_bias is None else beside(merged_bias, bias)

    def _by_distance(self, layer: int, back: int, ahead: int = 1) -> Array | None:
        """A layer's bias for keys back - 1 positions back to ahead - 1 ahead; None for no bias."""
        bias = None
        if self.config.positions == "relative":
            shared = self.config.shared_positions
            table = self.relpos_bias if shared else self.layers[layer].relative_posemb
            bias = table.by_distance(back, ahead)
        if window := self.config.window(layer):
            encoder = self.kind == "encoder"
            most = self.config.encoder_window(layer) if encoder else (window - 1, ahead)
            distance = np.arange(1 - back, ahead)
            seen = (distance >= -most[0]) & (distance <= most[1])
            if not seen.all():
                bias = masked(seen)[None] if bias is None else bias + masked(seen)[None]
        return bias

    def hidden(self, after: Sequence[Array], wanted: tuple[str, ...]) -> dict[str, Array]:
        """The wanted ones of the hidden states after each layer and the last norm."""
        hidden = {f"decoder/layers_{i}": x for i, x in enumerate(after)}
        if LAST in wanted:
            hidden[LAST] = self.norm.numbers(after[-1])
        return {name: hidden[name] for name in wanted}


def _trained(
    layer: nn.Module, x: Array, spec: Attending, source: Source | None
) -> tuple[Array, Array, Array]:
    """Runs a layer on whole texts in training; the gradient may run this function again."""
    return layer(x, spec, True, source, None)  # pyright: ignore[reportCallIssue]


def _rematerialised(remat: str) -> Callable[..., tuple[Array, Array, Array]] | None:
    """`_trained`, parts of which the gradient recomputes, by `Xla.remat`; None for no parts."""
    if remat == "none":
        return None
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return nn.remat(_trained, policy=kept if remat == "products" else None)
