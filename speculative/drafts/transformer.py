"""A smaller model of the same family as a draft."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Draft, Proposal, guess
from speculative.models.interface import Model
from speculative.processors import History
from speculative.types import Rows


@struct.dataclass
class TransformerDraftState:
    """The state of a draft's model, and the one guess that it may not have read."""

    model: Any
    unseen: Rows  # The last guess if all were accepted, which the next proposal feeds; else -1.


@dataclasses.dataclass(frozen=True)
class TransformerDraft(Draft):
    """Drafts autoregressively with a model.

    With `reads_target` the model has no encoder and reads the target's (`T5Config.source_dim`).
    """

    model: Model
    reads_target: bool = False
    reads_history: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[str, ...]:
        """The target's encoder, if that is read."""
        return ("encoder",) if self.reads_target else ()

    def start(self, params, inputs, cache_length, target) -> TransformerDraftState:
        """Encodes the sources, or takes the target's encoder output."""
        encoded = target.hidden["encoder"] if self.reads_target else None
        state = self.model.start(params, inputs, cache_length, encoded).state
        return TransformerDraftState(state, jnp.full(inputs.shape[0], -1, jnp.int32))

    def propose(
        self, params, state, last, uniforms, sampling, vocab_size, history=None
    ) -> Proposal:
        """One step of width 2, which reads `unseen` too, then gamma - 1 steps of width 1."""
        caught_up = state.unseen < 0
        # A row without an unseen guess feeds `last` and a filler, whose cache entry is masked.
        chunk = jnp.stack([jnp.where(caught_up, last, state.unseen), last], axis=1)
        at = jnp.where(caught_up, 0, 1)
        length = state.model.lengths + at + 1
        logits, model, _ = self.model.extend(params, state.model, chunk, at)
        model = self.model.rewind(model, length)

        def step(carry: tuple[Any, Array, History | None], uniform: Array) -> Any:
            model, newest, history = carry
            history = history and history.followed_by(newest)
            logits, model, _ = self.model.extend(params, model, newest[:, None])
            token, q = guess(logits[:, 0, :vocab_size], uniform, sampling, history)
            return (model, token, history), (token, q)

        first, q = guess(logits[:, 0, :vocab_size], uniforms[:, 0], sampling, history)
        # In a loop there is one step to compile, whatever gamma is.
        carry = model, first, history
        (model, last_guess, _), others = lax.scan(step, carry, uniforms[:, 1:].T)
        guesses, distributions = jax.tree.map(
            lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), (first, q), others
        )
        return Proposal(guesses, distributions, TransformerDraftState(model, last_guess))

    def commit(self, proposal, accepted, hidden) -> TransformerDraftState:
        """Rewinds to the accepted prefix; keeps the last guess as unseen if all were accepted."""
        gamma = proposal.guesses.shape[1]
        drafted: TransformerDraftState = proposal.state
        # The model has read `last` and all guesses but the last one.
        first = drafted.model.lengths - (gamma - 1)
        model = self.model.rewind(drafted.model, first + jnp.minimum(accepted, gamma - 1))
        return TransformerDraftState(model, jnp.where(accepted == gamma, drafted.unseen, -1))
