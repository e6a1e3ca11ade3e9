"""The interface of drafts: start, propose, commit."""

import abc
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from speculative.models.interface import Chunk, Started
from speculative.processors import History
from speculative.sampling import Sampling, argmax, categorical, greatest, standardise
from speculative.tree import Tree
from speculative.types import Guesses, Inputs, PyTree, Rows, State


class Proposal(NamedTuple):
    """Guesses, the distributions q that they were drawn from, and the state after guessing.

    q is standardised, [B, G, V], or None for deterministic proposals (one-hot q). Guesses are a
    chain, each after the one before it, unless there is a `tree` that names their parents.
    """

    guesses: Guesses
    q: Array | None
    state: State
    tree: Tree | None = None
    path: Array | None = None  # See `along`.

    def chunk(self, last: Rows) -> Chunk:
        """What the target reads of `last` [B], the newest token of each row, and the guesses."""
        tokens = jnp.concatenate([last[:, None], self.guesses], axis=1)
        if self.tree is None:
            return Chunk(tokens)
        positions, mask = jnp.asarray(self.tree.depths), jnp.asarray(self.tree.mask)
        return Chunk(tokens, positions[None], mask[None])

    def along(self, path: Array) -> "Proposal":
        """The guesses of a tree on a path, [B, D + 1] places from that of `last` on, as a chain."""
        at = jnp.maximum(path[:, 1:] - 1, 0)
        q = None if self.q is None else jnp.take_along_axis(self.q, at[..., None], axis=1)
        return Proposal(jnp.take_along_axis(self.guesses, at, axis=1), q, self.state, path=path)


def require_shapes(proposal: Proposal, batch: int, gamma: int, vocab_size: int) -> None:
    """Raises ValueError unless guesses are integers [B, G], and q, if there is one, [B, G, V]."""
    guesses, q, tree = proposal.guesses, proposal.q, proposal.tree
    if tree is not None and len(tree.parents) != gamma:
        raise ValueError(
            f"The draft proposed a tree of {len(tree.parents)} guesses; it must name the parents "
            f"of {gamma}, gamma."
        )
    if guesses.shape != (batch, gamma) or not jnp.issubdtype(guesses.dtype, jnp.integer):
        raise ValueError(
            f"The draft proposed guesses of shape {guesses.shape} and type {guesses.dtype}; they "
            f"must be whole numbers of shape {(batch, gamma)}, the batch size by gamma."
        )
    if q is not None and q.shape != (batch, gamma, vocab_size):
        raise ValueError(
            f"The draft proposed a q of shape {q.shape}; it must be {(batch, gamma, vocab_size)}: "
            "a probability of each token for each guess, or None where proposals are deterministic."
        )


FAULTS = (
    "",
    "guesses tokens that do not exist, or from logits that are not finite",
    "gives a q with NaN or infinity",
    "gives a q with probabilities below 0",
    "gives a q that does not sum to 1",
    "guesses tokens that are not drawn from the q that it reports",
)
"""What may be wrong with a proposal, by `fault_of`; 0 is nothing."""

# Of the sum of q, and of the sums between which a random number lies: what float32 rounds away.
TOLERANCE, DRAWN_TOLERANCE = 1e-3, 1e-4


def fault_of(proposal: Proposal, uniforms: Array, vocab_size: int) -> Rows:
    """What is wrong with each row of a proposal, a number in `FAULTS`: [B].

    Decoding is exact only if each guess is drawn from its q by the random number [B, G] given for
    it: the sums of q up to the guess, without it and with it, enclose so much of the whole sum.
    """
    guesses, q = proposal.guesses, proposal.q
    exists = (guesses >= 0) & (guesses < vocab_size)
    faults = jnp.where(exists, 0, 1)
    if q is not None:
        # A probability below 0 makes the sum -inf, so that one pass over q tells all.
        total = jnp.where(q < 0, -jnp.inf, q).sum(axis=-1)
        before = jnp.where(jnp.arange(vocab_size) < guesses[..., None], q, 0.0).sum(axis=-1)
        own = jnp.take_along_axis(q, guesses[..., None], axis=-1)[..., 0]
        low, high, at = before - DRAWN_TOLERANCE, before + own + DRAWN_TOLERANCE, uniforms * total
        drawn = (low < at) & (at < high) & (own > 0)
        of_q = jnp.where(jnp.abs(total - 1) <= TOLERANCE, jnp.where(drawn, 0, 5), 4)
        of_q = jnp.where(jnp.isfinite(total), of_q, jnp.where(total == -jnp.inf, 3, 2))
        faults = jnp.where(exists & (of_q > 0), of_q, faults)
    return faults.max(axis=1)


def guess(
    logits: Array, uniform: Rows, sampling: Sampling, history: History | None = None
) -> tuple[Rows, Array | None]:
    """Draws a token [B] from logits [B, V], and gives its q [B, V]; None if all rows are greedy.

    At T = 0, where q cannot show it, the token is -1 if the greatest logit is not finite. The
    `history` is the text before it, where there are processors.
    """
    if history is not None:
        processed = history.process(logits)
        # A draft may find all tokens forbidden that it knows; it guesses without processors then.
        some = (processed > -jnp.inf).any(axis=-1, keepdims=True)
        logits = jnp.where(some, processed, logits)
    if sampling.greedy:
        best = jnp.isfinite(greatest(logits, sampling))
        return jnp.where(best, argmax(logits), -1), None
    q = standardise(logits, sampling)
    token = categorical(q, uniform)
    if sampling.mixed:
        unknown = sampling.cold(1) & ~jnp.isfinite(greatest(logits, sampling))
        token = jnp.where(unknown, -1, token)
    return token, q


class Draft(abc.ABC):
    """Anything that guesses the next tokens; hashable, so that it can be a static argument.

    Decoding is exact for any draft that draws each guess from the q it reports, given the text so
    far; better guesses only make it faster. The loop refuses drafts that break this contract
    (`fault_of`), and `Pair.check` tells where they do.
    """

    @property
    def layers(self) -> tuple[str, ...]:
        """The target's layers whose hidden states it reads, as `models.interface` names them."""
        return ()

    @property
    def max_positions(self) -> int:
        """Positions that a text may have; 0 where there is no limit."""
        return 0

    @abc.abstractmethod
    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Started) -> State:
        """The state before the first token, for inputs [B, S].

        `target` holds the target's first state and the hidden states of `layers`. The first axis of
        each leaf holds the rows; caches may grow at their end.
        """

    @abc.abstractmethod
    def propose(
        self,
        params: PyTree,
        state: State,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
        history: History | None = None,
    ) -> Proposal:
        """Guesses the G = gamma tokens after `last` [B], the newest token of each row.

        Each guess is a token below `vocab_size`, drawn from its q by inversion with its own of the
        random numbers `uniforms` [B, G] in [0, 1), as `sampling.categorical` does: it is the first
        token at which the running sum of q exceeds the number. `history` is the text so far where
        there are logits processors: a draft that hands it to `guess` has them change its q as they
        change p; others guess without them.

        Guesses may be a tree (`Proposal.tree`), of which each guess has a q of its own, given the
        text and the guesses on its path. The rule must be one that verifies trees.
        """

    @abc.abstractmethod
    def commit(
        self, params: PyTree, proposal: Proposal, accepted: Rows, hidden: dict[str, Array]
    ) -> State:
        """The state after the target has accepted the first `accepted` [B] guesses.

        `hidden` are the target's hidden states [B, G + 1, D], by layer, where it read `last` and
        the guesses; the first `accepted` + 1 positions hold tokens that stay. Of a tree, proposal
        and hidden states are those along the path that was accepted (`Proposal.along`): its guesses
        are a chain, and `Proposal.path` tells where they stood in the chunk, as for `Model.keep`.
        """
