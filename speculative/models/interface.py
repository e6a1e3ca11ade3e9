"""The model interface: all that decoding, drafts and measurement know about a model."""

from typing import ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax

from speculative.types import Inputs, Logits, PyTree, Rows, State, Tokens


class Chunk(NamedTuple):
    """Tokens [B, L] that a model reads at once, after the text that it has read.

    In a chain, each token sees itself and all tokens before it. Otherwise the chunk branches:
    `positions` [B or 1, L] count from 0 after the text, and `mask` [B or 1, L, L] tells which
    tokens of the chunk each one sees, including itself. Caches keep the chunk's order.

    Branches may be read in several chunks, with `begun` tokens already in the caches: `positions`
    [B or 1, M] and `mask` [B or 1, L, M] then cover all M tokens of the branches.
    """

    tokens: Tokens
    positions: Array | None = None
    mask: Array | None = None
    begun: Array | int = 0

    @property
    def behind(self) -> Array:
        """Positions [B or 1, L] of the chunk's tokens, counted from the first after the text."""
        length = self.tokens.shape[1]
        if self.positions is None:
            return jnp.arange(length)[None]
        return lax.dynamic_slice_in_dim(self.positions, self.begun, length, axis=1)


class Started(NamedTuple):
    """A state before the first token, and the requested hidden states [B, S, D], by name."""

    state: State
    hidden: dict[str, Array]


class Extended(NamedTuple):
    """A chunk's logits, the state after it, and the requested hidden states [B, L, D], by name.

    Logits are [B, L, V] float32, entry l conditioned on everything up to and including token l.
    """

    logits: Logits
    state: State
    hidden: dict[str, Array]


class Model(Protocol):
    """An autoregressive model; hashable, so that it can be a static argument of `jax.jit`.

    Parameters and state are arguments. Rows of a batch advance raggedly: each has its own length.

    Hidden states are named after T5X's modules: "decoder/layers_3" is the output of that layer,
    "decoder/decoder_norm" is what logits are computed from, "encoder" is an encoder's output. A
    call returns those of the requested `layers` that it computes: `start` of an encoder-decoder
    returns the encoder's, `extend` the decoder's. The others cost nothing; an unknown one raises
    ValueError.
    """

    pad_id: ClassVar[int]  # Pads rows of inputs.
    # Whether inputs begin the text that is decoded (prompts) or are other texts (sources).
    decoder_only: ClassVar[bool]

    @property
    def max_positions(self) -> int:
        """The most positions that a text may have; 0 if there is no limit."""
        return 0

    def first(self, inputs: Inputs) -> Rows:
        """The token [B] that is fed first: a start token, or the last of each prompt [B, S]."""
        ...

    def start(
        self,
        params: PyTree,
        inputs: Inputs,
        cache_length: int,
        encoded: Array | None = None,
        layers: tuple[str, ...] = (),
    ) -> Started:
        """Reads inputs [B, S], padded at the right: sources, or prompts without their last token.

        Rows have at least one token. The state has room for `cache_length` tokens per row after a
        prompt. `encoded` [B, S, D] is another encoder's output for the inputs, in place of its own.
        """
        ...

    def resume(
        self, params: PyTree, begun: Started, known: Array, inputs: Inputs, cache_length: int
    ) -> Started:
        """`start` for prompts whose first `known` tokens, not all, have been read already.

        `begun` holds the state after the known tokens, and their hidden states in all requested
        layers. A model may also read everything again.
        """
        return self.start(params, inputs, cache_length, layers=tuple(begun.hidden))

    def extend(
        self,
        params: PyTree,
        state: State,
        chunk: Chunk,
        at: Rows | None = None,
        layers: tuple[str, ...] = (),
    ) -> Extended:
        """Appends a chunk of L tokens to each row, whose cache must have room for it.

        If `at` [B] gives a position of each row's chunk, logits are for that one only, [B, 1, V];
        hidden states are for all.
        """
        ...

    def rewind(self, state: State, lengths: Rows) -> State:
        """The state without each row's tokens beyond `lengths` [B], which exclude a prompt's."""
        ...

    def keep(self, state: State, length: Array | int, path: Array, count: Rows) -> State:
        """The state with only some of the last chunk's `length` tokens, in a new order.

        They are the first `count` [B] of those at indices path [B, K] in the chunk; a chain's path
        is 0, 1, ..., and `rewind` keeps its beginning.
        """
        ...
