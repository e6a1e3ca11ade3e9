"""A smaller model of the same family as a draft."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Proposal
from speculative.models.model import FlaxModel
from speculative.sampling import Sampling, argmax, categorical, standardise
from speculative.types import Inputs, PyTree, Rows


@struct.dataclass
class TransformerDraftState:
    """The model's state, and the one guess it may not have seen.

    When all guesses are accepted the model has not consumed its own last one; the next
    proposal then feeds it together with the target's token.

    Attributes:
        model: the model's state.
        unseen: [B] that guess, or -1.
    """

    model: Any
    unseen: Rows


@dataclasses.dataclass(frozen=True)
class TransformerDraft:
    """Drafts autoregressively with a model of three verbs.

    Attributes:
        model: the model.
        reads_target: whether it has no encoder and reads the target's (`T5Config.source_dim`).
            Its capacity then goes where the drafting happens, and it sees what the target sees.
    """

    model: FlaxModel
    reads_target: bool = False

    def start(
        self, params: PyTree, inputs: Inputs, cache_length: int, target: Any
    ) -> TransformerDraftState:
        """Encodes the sources, or reads what the target's encoder made of them."""
        encoded = (target.encoded,) if self.reads_target else ()
        state = self.model.start(params, inputs, cache_length, *encoded)
        return TransformerDraftState(state, jnp.full(inputs.shape[0], -1, jnp.int32))

    def propose(
        self,
        params: PyTree,
        state: TransformerDraftState,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        """One step of width 2 that catches up, then gamma - 1 of width 1."""
        caught_up = state.unseen < 0
        # A row that has caught up feeds `last` and a filler, whose entry lies behind the mask.
        chunk = jnp.stack([jnp.where(caught_up, last, state.unseen), last], axis=1)
        at = jnp.where(caught_up, 0, 1)
        length = state.model.lengths + at + 1
        logits, model = self.model.extend(params, state.model, chunk, at)
        model = self.model.rewind(model, length)

        def guess(logits: Array, uniform: Array) -> tuple[Array, Array | None]:
            logits = logits[:, 0, :vocab_size]
            if sampling.greedy:
                return argmax(logits), None
            q = standardise(logits, sampling)
            return categorical(q, uniform), q

        def step(carry: tuple[Any, Array], uniform: Array) -> Any:
            logits, model = self.model.extend(params, carry[0], carry[1][:, None])
            token, q = guess(logits, uniform)
            return (model, token), (token, q)

        first, q = guess(logits, uniforms[:, 0])
        # A loop, not a line of copies: one step to compile, whatever gamma is.
        (model, last_guess), others = lax.scan(step, (model, first), uniforms[:, 1:].T)
        guesses, distributions = jax.tree.map(
            lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), (first, q), others
        )
        return Proposal(guesses, distributions, TransformerDraftState(model, last_guess))

    def commit(self, proposal: Proposal, accepted: Rows) -> TransformerDraftState:
        """Rewinds to the accepted prefix; remembers the last guess if all were accepted."""
        gamma = proposal.guesses.shape[1]
        drafted: TransformerDraftState = proposal.state
        # Having seen `last` and all guesses but one, it keeps `last` and the accepted ones.
        first = drafted.model.lengths - (gamma - 1)
        model = self.model.rewind(drafted.model, first + jnp.minimum(accepted, gamma - 1))
        return TransformerDraftState(model, jnp.where(accepted == gamma, drafted.unseen, -1))
