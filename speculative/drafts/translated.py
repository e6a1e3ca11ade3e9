"""A draft with another vocabulary than its target's: it guesses the pieces that both have.

This is token-level intersection (Timor et al., 2025, arXiv 2502.05202): the draft's distribution
is restricted to tokens of the target, which keeps decoding exact. A token of the target that the
draft lacks is read as the last of the draft's pieces that spell it, so that a text has as many
tokens in both; this lowers only the acceptance rate.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from speculative.models import FlaxModel
from speculative.models.interface import Chunk, Extended, Model, Started
from speculative.vocabulary import Vocabulary

LEAST = 0.1  # The share of the smaller vocabulary's pieces that both must have.


@struct.dataclass
class Tables:
    """How tokens of target and draft correspond, [V] int32 each, by the target's tokens."""

    read_as: Any  # The token that the draft reads.
    logits: Any  # The index in the draft's logits; one past their end for a token without one.


def tables(
    target: Vocabulary, draft: Vocabulary, logits: np.ndarray | None, count: int
) -> tuple[Tables, int]:
    """The tables of two vocabularies, and how many tokens both share.

    The draft's logits cover `count` tokens: those in `logits` [K], or all. Raises ValueError if
    hardly any tokens are shared.
    """
    theirs = {spelled: i for i, spelled in enumerate(draft.spelled) if spelled is not None}
    same = {target.start_id: draft.start_id, **dict.fromkeys(target.eos_ids, draft.eos_ids[0])}
    place = np.full(max(draft.size, count), count, np.int32)
    place[np.arange(count) if logits is None else logits] = np.arange(count)
    read_as, of_logits = np.zeros(target.size, np.int32), np.full(target.size, count, np.int32)
    guessed = set[int]()
    # Bytes come last: if another piece spells the same, texts have that piece.
    for token in sorted(range(target.size), key=lambda i: target.pieces[i].startswith("<0x")):
        spelled = target.spelled[token]
        own = same.get(token, None if spelled is None else theirs.get(spelled))
        if target.pieces[token] in draft.pieces[token : token + 1]:
            own = token
        if own is not None:
            read_as[token] = own
            if own not in guessed and (token != target.start_id or token in target.eos_ids):
                of_logits[token] = place[own]
                guessed.add(own)
        elif spelled is not None:
            read_as[token] = draft.last_piece(spelled)
    shared = int((of_logits < count).sum())
    smaller = min(target.size, count)
    if shared < LEAST * smaller:
        raise ValueError(
            f"The vocabularies {draft.path} of the draft and {target.path} of the target share "
            f"{shared:,} of {smaller:,} pieces, too few to guess with; take a draft with more."
        )
    return Tables(read_as, of_logits), shared


@dataclasses.dataclass(frozen=True)
class Translated(Model):
    """A draft's model, used with the target's tokens; parameters are the model's and `Tables`."""

    model: FlaxModel

    @property
    def pad_id(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The model's padding token."""
        return self.model.pad_id

    @property
    def decoder_only(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the model is decoder-only."""
        return self.model.decoder_only

    @property
    def max_positions(self) -> int:
        """The model's limit."""
        return self.model.max_positions

    def first(self, inputs):
        """See `Model.first`."""
        return self.model.first(inputs)

    def start(self, params, inputs, cache_length, encoded=None, layers=()) -> Started:
        """See `Model.start`."""
        inner, tables = params
        read = jnp.where(inputs == self.pad_id, self.pad_id, _of(tables.read_as, inputs))
        return self.model.start(inner, read, cache_length, encoded, layers)

    def extend(self, params, state, chunk, at=None, layers=()) -> Extended:
        """See `Model.extend`."""
        inner, tables = params
        chunk = Chunk(_of(tables.read_as, chunk.tokens), *chunk[1:])
        logits, state, hidden = self.model.extend(inner, state, chunk, at, layers)
        room = (*[(0, 0)] * (logits.ndim - 1), (0, 1))
        own = jnp.pad(logits, room, constant_values=-jnp.inf)
        place = jnp.minimum(tables.logits, logits.shape[-1])
        return Extended(jnp.take(own, place, axis=-1), state, hidden)

    def rewind(self, state, lengths):
        """See `Model.rewind`."""
        return self.model.rewind(state, lengths)

    def keep(self, state, length, path, count):
        """See `Model.keep`."""
        return self.model.keep(state, length, path, count)


def _of(table: Array, tokens: Array) -> Array:
    return jnp.take(table, jnp.maximum(tokens, 0))
