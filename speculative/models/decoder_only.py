"""Decoder-only models of all families: inputs are prompts, which outputs continue."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.models.config import Config
from speculative.models.flax_model import FlaxModel
from speculative.models.interface import Chunk, Started
from speculative.models.layers import Layer
from speculative.models.positions import masked, positions_in, same_segment, shifted
from speculative.models.stack import DecoderState
from speculative.models.transformer import Transformer
from speculative.ragged import resized
from speculative.types import PADDING, Inputs, Logits, PyTree, Rows, State

AT_ONCE = 512  # Tokens of a long prompt read together, so that no array holds all pairs of tokens.
READ_PROMPT = "read_prompt"  # Names the loop over these parts in profiles and compiled programs.
TURN = 64  # Tokens of a chat's next turn read together; turns are often short.


def widest(config: Config) -> int:
    """The widest window of a decoder's layers; 0 if none has one."""
    return max(config.window(i) for i in range(config.decoder_layers))


def held(config: Config) -> int:
    """How many tokens of a long prompt layers with windows hold.

    They hold some more than a window, so that the end of a chat's prompt may be read again.
    """
    return widest(config) + 2 * TURN


def cache_room(config: Config, layer: int, prompt: int, more: int) -> int:
    """Positions in a layer's caches for a prompt of that many tokens and `more` after it."""
    if prompt <= AT_ONCE or not config.window(layer):
        return prompt + more
    return min(prompt + more, held(config) + max(AT_ONCE, more))


class Decoder(Transformer):
    """Embedding and stack; the root of the parameter tree."""

    def setup(self) -> None:
        """Declares embedding and stack; a small embedding keeps tied logits about 1."""
        self.declare(self.config.emb_dim**-0.5, Layer)

    def __call__(
        self, inputs, decoder_inputs, segments, train, encoded, layers
    ) -> tuple[Logits, dict[str, Array]]:
        """Teacher-forced logits and hidden states; see `FlaxModel.forward_with_hidden`."""
        segment = jnp.ones_like(decoder_inputs) if segments is None else segments[1]
        index = jnp.arange(segment.shape[1])
        mask = same_segment(segment, segment, index[:, None] >= index)
        positions = positions_in(segment)
        embedded = self.embed(decoder_inputs, positions)
        after, _, _ = self.decoder(embedded, mask, train, positions=positions)
        return self.logits(after[-1], self.decoder.norm.numbers), self.decoder.hidden(after, layers)

    def empty(self, batch: int, prompt: int, more: int) -> DecoderState:
        """The state of a batch that has read nothing; see `cache_room`."""
        config, caches = self.config, []
        for i in range(config.decoder_layers):
            room = cache_room(config, i, prompt, more)
            shape = self.backend.cache_shape(batch, config.kv_heads, room, config.head_dim)
            caches.append(jnp.zeros(shape, config.dtype))
        zeros = jnp.zeros(batch, jnp.int32)
        dropped = zeros if widest(config) else None
        return DecoderState(zeros, tuple(caches), tuple(caches), zeros, dropped)

    def start(
        self, inputs: Inputs, cache_length: int, encoded: Array | None, layers: tuple[str, ...]
    ) -> Started:
        """The state after prompts [B, S] padded with -1; see `interface.Model.start`.

        With `Reads.target_layers`, `encoded` [B, S, F] holds the target's hidden states for them.
        """
        seen = inputs != PADDING
        index = jnp.arange(inputs.shape[1])
        # Padding comes last: its keys are masked until other tokens' keys overwrite them. It is
        # zeroed and sees nothing, so that kernels on CPU skip it.
        mask = masked((index[:, None] >= index) & seen[:, :, None])[:, None]
        x = jnp.where(seen[..., None], self.embed(jnp.where(seen, inputs, 0), index[None]), 0)
        if encoded is not None:
            x = self.reads_target(shifted(encoded, seen), x)
        after, *caches = self.decoder(x, mask, positions=index[None])
        room = ((0, 0), (0, 0), (0, cache_length), (0, 0))
        keys, values = (tuple(jnp.pad(x, room) for x in cache) for cache in caches)
        prompt = seen.sum(axis=1, dtype=jnp.int32) - 1
        zeros = jnp.zeros_like(prompt)
        dropped = zeros if widest(self.config) else None
        state = DecoderState(zeros, keys, values, prompt, dropped)
        return Started(state, self.decoder.hidden(after, layers))


@dataclasses.dataclass(frozen=True)
class DecoderOnly(FlaxModel):
    """A decoder-only model of a given configuration, as pure functions on explicit parameters."""

    pad_id: ClassVar[int] = PADDING
    decoder_only: ClassVar[bool] = True
    root = Decoder

    def start(self, params, inputs, cache_length, encoded=None, layers=()) -> Started:
        """See `Model.start`; a long prompt is read in chunks of `AT_ONCE` tokens."""
        if inputs.shape[1] <= AT_ONCE:
            return super().start(params, inputs, cache_length, encoded, layers)
        state = self._empty(params, inputs, cache_length, AT_ONCE)
        shape = *inputs.shape, self.config.emb_dim
        hidden = {name: jnp.zeros(shape, self.config.dtype) for name in layers}
        begun = Started(state, hidden)
        return self._read(params, begun, jnp.int32(0), inputs, AT_ONCE, encoded)

    def resume(self, params, begun, known, inputs, cache_length) -> Started:
        """See `Model.resume`; new tokens are read `TURN` at a time.

        Where a window no longer holds what the first of them sees, all tokens are read again.
        """
        known = known // TURN * TURN
        state = self._slid(begun.state, known[None])
        if state.dropped is not None:
            enough = jnp.all(state.dropped <= jnp.maximum(known - widest(self.config), 0))
            known = jnp.where(enough, known, 0)
            state = dataclasses.replace(state, dropped=jnp.where(enough, state.dropped, 0))
        begun = begun._replace(state=state)
        empty = jax.eval_shape(lambda: self._empty(params, inputs, cache_length, TURN))
        shape = jax.ShapeDtypeStruct((*inputs.shape, self.config.emb_dim), self.config.dtype)
        shapes: dict[str, Any] = dict.fromkeys(begun.hidden, shape)
        begun = resized(begun, Started(empty, shapes))
        return self._read(params, begun, known, inputs, TURN)

    def _empty(self, params: PyTree, inputs: Inputs, cache_length: int, at_once: int) -> State:
        """The state before prompts that are read `at_once` tokens at a time."""
        batch, length = inputs.shape
        length += -length % at_once
        return self._apply(params, batch, length, cache_length, method="empty")

    def _slid(self, state: State, read: Array) -> State:
        """The state whose layers with windows hold what is seen after `read` [B or 1] tokens."""
        if state.dropped is None:
            return state
        dropped = jnp.maximum(state.dropped, read - held(self.config))
        roll = jax.vmap(functools.partial(jnp.roll, axis=1))

        def slid(i: int, cache: Array) -> Array:
            return roll(cache, state.dropped - dropped) if self.config.window(i) else cache

        keys, values = (
            tuple(slid(i, cache) for i, cache in enumerate(caches))
            for caches in (state.keys, state.values)
        )
        return dataclasses.replace(state, keys=keys, values=values, dropped=dropped)

    def _read(
        self,
        params: PyTree,
        begun: Started,
        known: Array,
        inputs: Inputs,
        at_once: int,
        encoded: Array | None = None,
    ) -> Started:
        """The state after prompts whose first `known` tokens have been read already."""
        seen = inputs != PADDING
        size, length = seen.sum(axis=1, dtype=jnp.int32), inputs.shape[1]
        room = (0, 0), (0, -length % at_once)
        tokens = jnp.pad(jnp.where(seen, inputs, 0), room)
        before = None if encoded is None else shifted(encoded, seen)
        hidden = {name: jnp.pad(x, (*room, (0, 0))) for name, x in begun.hidden.items()}
        zeros = jnp.zeros_like(size)

        def read(number: Array, carried: tuple[State, dict[str, Array]]) -> Any:
            (state, hidden), place = carried, number * at_once
            part = functools.partial(
                lax.dynamic_slice_in_dim, start_index=place, slice_size=at_once, axis=1
            )
            chunk = Chunk(part(tokens))
            if before is not None:  # A draft; its hidden states are not requested.
                state, new = self.read_on(params, state, chunk, part(before))[1], {}
            else:
                _, state, new = self.extend(params, state, chunk, zeros, tuple(hidden))
            return self._slid(state, jnp.minimum(place + at_once, size - 1)), {
                name: lax.dynamic_update_slice_in_dim(x, new[name], place, axis=1)
                for name, x in hidden.items()
            }

        state = dataclasses.replace(begun.state, lengths=zeros + known, prompt=zeros)
        chunks = known // at_once, -(-size.max() // at_once)
        with jax.named_scope(READ_PROMPT):
            state, hidden = lax.fori_loop(*chunks, read, (state, hidden))
        state = dataclasses.replace(state, lengths=zeros, prompt=size - 1)
        return Started(state, {name: x[:, :length] for name, x in hidden.items()})

    def first(self, inputs: Inputs) -> Rows:
        """The last token of each prompt: [B]."""
        last = (inputs != PADDING).sum(axis=1, dtype=jnp.int32) - 1
        return jnp.take_along_axis(inputs, last[:, None], axis=1)[:, 0]
