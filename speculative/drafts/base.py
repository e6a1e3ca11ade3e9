"""The face of a draft: start, propose, commit."""

from typing import Any, NamedTuple, Protocol

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


class Draft(Protocol):
    """Anything that guesses the next tokens; hashable, so that it can be a static argument.

    A draft is exact whatever it guesses, as long as each guess was drawn from the q it
    reports, given what it has seen; better guesses only make decoding faster.
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
