"""The face of a draft: start, propose, commit."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from speculative.sampling import Sampling
from speculative.types import Guesses, Inputs, PyTree, Rows


class Proposal(NamedTuple):
    """Guesses and where they came from.

    Attributes:
        guesses: [B, G] int32.
        q: [B, G, V] the standardised distributions the guesses were drawn from, or None
            where each guess was certain (one-hot q).
        state: the draft's state after guessing.
    """

    guesses: Guesses
    q: Array | None
    state: Any


def require_shapes(proposal: Proposal, batch: int, gamma: int, vocab_size: int) -> None:
    """Raises ValueError unless guesses are integers [B, G], and q, if there is one, [B, G, V]."""
    guesses, q = proposal.guesses, proposal.q
    if guesses.shape != (batch, gamma) or not jnp.issubdtype(guesses.dtype, jnp.integer):
        raise ValueError(
            f"The draft proposed guesses of shape {guesses.shape} and type {guesses.dtype}; they "
            f"must be whole numbers of shape {(batch, gamma)}, a row's batch by gamma."
        )
    if q is not None and q.shape != (batch, gamma, vocab_size):
        raise ValueError(
            f"The draft proposed a q of shape {q.shape}; it must be {(batch, gamma, vocab_size)}: "
            "a probability of each token for each guess, or None where guesses are certain."
        )


class Draft(Protocol):
    """Anything that guesses the next tokens; hashable, so that it can be a static argument.

    A draft is exact whatever it guesses, as long as each guess was drawn from the q it
    reports, given what it has seen; better guesses only make decoding faster. `Pair.check` tells
    where a draft breaks this.
    """

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> Any:
        """The state before the first token, for sources [B, S].

        `target` is the state in which the target starts; a draft may read what is in it.
        """
        ...

    def propose(
        self,
        params: PyTree,
        state: Any,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        """Guesses what follows `last` [B], the newest token of each row.

        `uniforms` [B, G] in [0, 1) are the random numbers, one a guess; G is gamma.
        `vocab_size` is the number of tokens V that may be guessed.
        """
        ...

    def commit(self, proposal: Proposal, accepted: Rows) -> Any:
        """The state once the target has accepted the first `accepted` [B] guesses."""
        ...
