"""The interface of drafts: start, propose, commit."""

import abc
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from speculative.models.interface import Chunk, Started
from speculative.processors import History
from speculative.sampling import Sampling, categorical, choose, greatest, standardise
from speculative.tree import Growth, Tree
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
        """The target's chunk: the newest token of each row, `last` [B], then the guesses."""
        tokens = jnp.concatenate([last[:, None], self.guesses], axis=1)
        return Chunk(tokens, *((self.tree.depths, self.tree.mask) if self.tree else ()))

    def probabilities(self, vocab_size: int) -> Array:
        """The q [B, G, V] of a chain, one-hot where guesses are deterministic."""
        return jax.nn.one_hot(self.guesses, vocab_size) if self.q is None else self.q

    def along(self, path: Array) -> "Proposal":
        """A tree's guesses along a path, [B, D + 1] places from that of `last` on, as a chain."""
        at = jnp.maximum(path[:, 1:] - 1, 0)
        guesses = jnp.take_along_axis(self.guesses, at, axis=1)
        return Proposal(guesses, None, self.state, path=path)


def require_grows(grows: bool, name: str, tree: int) -> None:
    """Raises ValueError if a tree is requested and the draft of this name guesses chains."""
    if tree and not grows:
        raise ValueError(
            f"The draft {name} guesses chains, and tree is {tree}; set tree to 0, or take a model "
            "or an n-gram table as the draft."
        )


def require_shapes(proposal: Proposal, batch: int, gamma: int, vocab_size: int) -> None:
    """Raises ValueError unless guesses are integers [B, G], and q, if there is one, [B, G, V]."""
    guesses, q = proposal.guesses, proposal.q
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
"""The faults that `fault_of` finds in a proposal, by number; 0 is none."""

# Tolerances for float32 rounding, of the sum of q and of the sums that enclose a random number.
TOLERANCE, DRAWN_TOLERANCE = 1e-3, 1e-4


def fault_of(proposal: Proposal, numbers: Array, vocab_size: int) -> Rows:
    """The fault of each row of a proposal, an index into `FAULTS`: [B].

    Decoding is exact only if each guess is drawn from its q by its random number [B, G]: that
    fraction of the whole sum lies between the sums of q up to the guess, without it and with it.
    """
    guesses, q = proposal.guesses, proposal.q
    exists = (guesses >= 0) & (guesses < vocab_size)
    faults = jnp.where(exists, 0, 1)
    if q is not None:
        # A probability below 0 makes the sum -inf, so one pass over q is enough.
        total = jnp.where(q < 0, -jnp.inf, q).sum(axis=-1)
        before = jnp.where(jnp.arange(vocab_size) < guesses[..., None], q, 0.0).sum(axis=-1)
        own = jnp.take_along_axis(q, guesses[..., None], axis=-1)[..., 0]
        low, high, at = before - DRAWN_TOLERANCE, before + own + DRAWN_TOLERANCE, numbers * total
        drawn = (low < at) & (at < high) & (own > 0)
        of_q = jnp.where(jnp.abs(total - 1) <= TOLERANCE, jnp.where(drawn, 0, 5), 4)
        of_q = jnp.where(jnp.isfinite(total), of_q, jnp.where(total == -jnp.inf, 3, 2))
        faults = jnp.where(exists & (of_q > 0), of_q, faults)
    return faults.max(axis=1)


def guess(
    logits: Array, numbers: Array, sampling: Sampling, history: History | None = None
) -> tuple[Rows, Array | None]:
    """Draws a token [B] from logits [B, V], and returns it with its q [B, V].

    It is drawn by inversion from numbers [B], or by `sampling.choose` from noise [B, V]. There is
    no q with noise, nor if all rows are greedy. The token is -1 if the greatest logit is not finite
    and q cannot show it. `history` is the text before it, if there are processors.
    """
    if history is not None:
        logits = allowed(logits, history.process(logits))
    if sampling.greedy or numbers.ndim > 1:
        known = jnp.isfinite(greatest(logits, sampling))
        return jnp.where(known, choose(logits, sampling, numbers), -1), None
    q = standardise(logits, sampling)
    token = categorical(q, numbers)
    if sampling.mixed:
        unknown = sampling.cold(1) & ~jnp.isfinite(greatest(logits, sampling))
        token = jnp.where(unknown, -1, token)
    return token, q


def allowed(logits: Array, processed: Array) -> Array:
    """The processed logits [..., V], or the original ones where all tokens are forbidden.

    A draft may know no other tokens.
    """
    return jnp.where((processed > -jnp.inf).any(axis=-1, keepdims=True), processed, logits)


class Draft(abc.ABC):
    """Anything that guesses the next tokens; hashable, so that it can be a static argument.

    Decoding is exact for any draft that draws each guess from the q it reports, given the text so
    far; better guesses only make it faster. The loop refuses drafts that break this contract
    (`fault_of`), and `Pair.check` reports where they do.
    """

    grows: ClassVar[bool] = False  # Whether it implements `grow`.

    @property
    def layers(self) -> tuple[str, ...]:
        """The target layers whose hidden states the draft reads, named as in `models.interface`."""
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
        numbers: Array,
        sampling: Sampling,
        vocab_size: int,
        history: History | None = None,
    ) -> Proposal:
        """Guesses the G = gamma tokens after `last` [B], the newest token of each row.

        Each guess is a token below `vocab_size`, drawn from its q by inversion with its own random
        number in `numbers` [B, G], in [0, 1), as `sampling.categorical` does: it is the first token
        at which the running sum of q exceeds the number. If the rule is coupled, `numbers` are
        noise [B, G, V] instead, `sampling.choose` makes each guess, and there is no q. `history` is
        the text so far if there are logits processors: they change q as they change p if a draft
        passes it to `guess`; other drafts guess without them.
        """

    def grow(
        self,
        params: PyTree,
        state: State,
        last: Rows,
        noise: Array | None,
        sampling: Sampling,
        vocab_size: int,
        growth: Growth,
        history: History | None = None,
    ) -> Proposal:
        """Guesses a tree of tokens after `last` [B], for a draft that `grows`.

        `noise` [B, D, V] belongs to the D positions after it; it is None if all rows are greedy.
        """
        raise NotImplementedError(f"{type(self).__name__} guesses chains.")

    @abc.abstractmethod
    def commit(
        self, params: PyTree, proposal: Proposal, accepted: Rows, hidden: dict[str, Array]
    ) -> State:
        """The state after the target has accepted the first `accepted` [B] guesses.

        `hidden` holds, by layer, the target's hidden states [B, G + 1, D] at `last` and the
        guesses; the first `accepted` + 1 positions hold tokens that stay. For a tree, proposal and
        hidden states are those along the accepted path (`Proposal.along`): its guesses are a chain,
        and `Proposal.path` gives their places in the chunk, as for `Model.keep`.
        """
