"""A smaller model of the same family as a draft."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from speculative.backends import look_up
from speculative.drafts.base import Draft, Proposal, guess
from speculative.drafts.growing import Grown, Level, ReadTree, grow, nodes_read
from speculative.models.interface import Chunk, Model
from speculative.processors import History
from speculative.sampling import Sampling
from speculative.tree import Growth
from speculative.types import Guesses, Logits, PyTree, Rows, State


@struct.dataclass
class TransformerDraftState:
    """The state of a draft's model, and the one guess that it may not have read."""

    model: State
    unseen: Rows  # The last guess if all were accepted, which the next proposal reads; else -1.


def guess_on(
    model: Model,
    logits: Logits,
    state: State,
    read: Callable[[State, Rows], tuple[Logits, State]],
    numbers: Array,
    sampling: Sampling,
    vocab_size: int,
    history: History | None,
) -> tuple[Guesses, Array | None, State]:
    """Guesses [B, G], the first from logits [B, 1, V], their q, and the state after reading them.

    `read` appends a guess to a state and returns the logits after it; the last guess is not read.
    """
    tokens = getattr(model, "draft_vocabulary", None)
    size = vocab_size if tokens is None else len(tokens)

    def draw(logits: Logits, number: Array, history: History | None) -> tuple[Rows, Array | None]:
        logits = logits[:, 0, :size]
        if tokens is None:
            return guess(logits, number, sampling, history)
        if history is not None:  # Processors change the logits of all tokens.
            return guess(whole(logits, tokens, vocab_size, -jnp.inf), number, sampling, history)
        place, q = guess(logits, number if number.ndim == 1 else number[:, tokens], sampling)
        token = look_up(jnp.asarray(tokens)[:, None], place)[:, 0]
        return jnp.where(place < 0, -1, token), q

    def step(carry: tuple[State, Array, History | None], number: Array) -> Any:
        state, newest, history = carry
        history = history and history.followed_by(newest)
        logits, state = read(state, newest)
        token, q = draw(logits, number, history)
        return (state, token, history), (token, q)

    first, q = draw(logits, numbers[:, 0], history)
    # A loop leaves a single step to compile, whatever gamma is.
    (state, *_), others = lax.scan(step, (state, first, history), numbers[:, 1:].swapaxes(0, 1))
    guesses, q = jax.tree.map(
        lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), (first, q), others
    )
    if q is not None and tokens is not None and history is None:
        q = whole(q, tokens, vocab_size, 0.0)
    return guesses, q, state


def grow_on(
    model: Model,
    logits: Logits,
    state: State,
    read: Callable[[State, Level], tuple[Logits, State]],
    noise: Array | None,
    sampling: Sampling,
    vocab_size: int,
    growth: Growth,
    history: History | None,
) -> Grown:
    """Grows a tree with a model, from logits [B, 1, V] of the first guesses; see `guess_on`."""
    tokens = getattr(model, "draft_vocabulary", None)
    size = vocab_size if tokens is None else len(tokens)

    def of(logits: Logits) -> Logits:
        logits = logits[..., :size]
        if tokens is None or history is None:
            return logits
        return whole(logits, tokens, vocab_size, -jnp.inf)  # Processors change those of all tokens.

    def read_of(state: State, level: Level) -> tuple[Logits, State]:
        logits, state = read(state, level)
        return of(logits), state

    known = None if history is not None else tokens
    return grow(of(logits)[:, 0], state, read_of, noise, sampling, growth, known, history)


def whole(values: Array, tokens: np.ndarray, vocab_size: int, others: float) -> Array:
    """Expands values [..., K] of some tokens to values [..., V] of all; the rest get `others`.

    This is a gather, which on CPU is many times as fast as a scatter.
    """
    index = np.full(vocab_size, len(tokens), np.int32)
    index[tokens] = np.arange(len(tokens))
    filler = jnp.full((*values.shape[:-1], 1), others, values.dtype)
    return jnp.take(jnp.concatenate([values, filler], axis=-1), index, axis=-1)


@dataclasses.dataclass(frozen=True)
class TransformerDraft(Draft):
    """Drafts autoregressively with a model.

    With `reads_target` the model has no encoder and reads the target's (`Reads.source_dim`).
    """

    model: Model
    reads_target: bool = False
    grows = True

    @property
    def max_positions(self) -> int:
        """The model's limit."""
        return self.model.max_positions

    @property
    def layers(self) -> tuple[str, ...]:
        """The target's encoder, if that is read."""
        return ("encoder",) if self.reads_target else ()

    def start(self, params, inputs, cache_length, target) -> TransformerDraftState:
        """Encodes the sources, or takes the target's encoder output."""
        encoded = target.hidden["encoder"] if self.reads_target else None
        state = self.model.start(params, inputs, cache_length, encoded).state
        return TransformerDraftState(state, jnp.full(inputs.shape[0], -1, jnp.int32))

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Makes a step of width 2, which also reads `unseen`, then gamma - 1 steps of width 1."""
        logits, model = self._catch_up(params, state, last)

        def read(model: State, newest: Array) -> tuple[Array, State]:
            return self.model.extend(params, model, Chunk(newest[:, None]))[:2]

        guesses, q, model = guess_on(
            self.model, logits, model, read, numbers, sampling, vocab_size, history
        )
        return Proposal(guesses, q, TransformerDraftState(model, guesses[:, -1]))

    def grow(
        self, params, state, last, noise, sampling, vocab_size, growth, history=None
    ) -> Proposal:
        """Makes a step of width 2, which reads `unseen` too, then a pass per level but the last."""
        logits, model = self._catch_up(params, state, last)

        def read(model: State, level: Level) -> tuple[Logits, State]:
            return self.model.extend(params, model, level.chunk)[:2]

        grown = grow_on(
            self.model, logits, model, read, noise, sampling, vocab_size, growth, history
        )
        return Proposal(
            grown.guesses, None, ReadTree(grown.state, grown.read_as, growth.read), grown.tree
        )

    def follow(self, params, state, last, guesses) -> TransformerDraftState:
        """The state after proposing these guesses, which are read at once."""
        _, model = self._catch_up(params, state, last)
        if guesses.shape[1] > 1:
            model = self.model.extend(params, model, Chunk(guesses[:, :-1])).state
        return TransformerDraftState(model, guesses[:, -1])

    def follow_tree(self, params, state, last, guesses, tree) -> ReadTree:
        """The state after proposing a tree, all of whose nodes are read at once."""
        _, model = self._catch_up(params, state, last)
        mask = tree.mask[:, 1:, 1:]
        model = self.model.extend(params, model, Chunk(guesses, tree.depths[:, 1:] - 1, mask)).state
        batch, count = guesses.shape
        return ReadTree(model, jnp.broadcast_to(jnp.arange(count), (batch, count)), count)

    def _catch_up(
        self, params: PyTree, state: TransformerDraftState, last: Rows
    ) -> tuple[Logits, State]:
        """The logits after `last`, and the model's state after reading it."""
        caught_up = state.unseen < 0
        # A row without an unseen guess feeds `last` and a filler, whose cache entry is masked.
        chunk = jnp.stack([jnp.where(caught_up, last, state.unseen), last], axis=1)
        at = jnp.where(caught_up, 0, 1)
        length = state.model.lengths + at + 1
        logits, model, _ = self.model.extend(params, state.model, Chunk(chunk), at)
        return logits, self.model.rewind(model, length)

    def commit(self, params, proposal, accepted, hidden) -> TransformerDraftState:
        """Rewinds to the accepted prefix; keeps the last guess as unseen if all were accepted."""
        if proposal.path is not None:
            return self._commit_path(proposal, proposal.path, accepted)
        gamma = proposal.guesses.shape[1]
        drafted: TransformerDraftState = proposal.state
        # The model has read `last` and all guesses but the last one.
        first = drafted.model.lengths - (gamma - 1)
        model = self.model.rewind(drafted.model, first + jnp.minimum(accepted, gamma - 1))
        return TransformerDraftState(model, jnp.where(accepted == gamma, drafted.unseen, -1))

    def _commit_path(
        self, proposal: Proposal, path: Array, accepted: Rows
    ) -> TransformerDraftState:
        """Keeps the nodes of a tree's path that were read; the last one may be unseen."""
        drafted: ReadTree = proposal.state
        nodes, known = nodes_read(drafted.read_as, path, accepted)
        model = self.model.keep(drafted.model, drafted.count, nodes, known)
        last = jnp.maximum(accepted - 1, 0)[:, None]
        newest = jnp.take_along_axis(proposal.guesses, last, axis=1)
        return TransformerDraftState(model, jnp.where(known < accepted, newest[:, 0], -1))
