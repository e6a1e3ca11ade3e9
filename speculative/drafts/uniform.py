"""Tokens at random: the draft that knows nothing, and is exact all the same."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from speculative.drafts.base import Proposal
from speculative.sampling import Sampling, categorical
from speculative.types import Inputs, PyTree, Rows


@dataclasses.dataclass(frozen=True)
class UniformDraft:
    """Every token equally likely, at any temperature; it has no parameters and no state."""

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> tuple[()]:
        """Nothing to remember."""
        return ()

    def propose(
        self,
        params: PyTree,
        state: tuple[()],
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        """Uniform guesses; top-k, top-p and temperature leave a uniform q as it is."""
        q = jnp.full((*uniforms.shape, vocab_size), 1.0 / vocab_size, jnp.float32)
        return Proposal(categorical(q, uniforms), q, state)

    def commit(self, proposal: Proposal, accepted: Rows) -> tuple[()]:
        """Nothing to remember."""
        return proposal.state
