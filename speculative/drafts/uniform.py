"""Random tokens: the worst draft, which is still exact."""

import dataclasses

import jax.numpy as jnp

from speculative.drafts.base import Draft, Proposal
from speculative.sampling import argmax, categorical
from speculative.types import State


@dataclasses.dataclass(frozen=True)
class UniformDraft(Draft):
    """Guesses every token with equal probability; it has no parameters and no state."""

    def start(self, params, inputs, cache_length, target) -> State:
        """The empty state."""
        return ()

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Uniform guesses; top-k, top-p and temperature leave a uniform q as it is."""
        if numbers.ndim > 2:
            return Proposal(argmax(numbers), None, state)
        q = jnp.full((*numbers.shape, vocab_size), 1.0 / vocab_size, jnp.float32)
        return Proposal(categorical(q, numbers), q, state)

    def commit(self, params, proposal, accepted, hidden) -> State:
        """The empty state."""
        return proposal.state
