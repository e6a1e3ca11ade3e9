"""A small model as a draft that reads the target's hidden states (EAGLE, arXiv 2401.15077)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Draft, Proposal
from speculative.drafts.transformer import TransformerDraft, guess_on
from speculative.models import FlaxModel
from speculative.types import Logits, Rows


@struct.dataclass
class HiddenDraftState:
    """The state of a draft's model, which has read all of the text but the newest token.

    Every token was read with the target's hidden states of the position before it.
    """

    model: Any
    hidden: Array  # [B, 1, F] the target's, of the newest token's predecessor; 0 before the first.


@dataclasses.dataclass(frozen=True)
class HiddenDraft(Draft):
    """Drafts autoregressively with a model of `Config.target_layers`.

    The first guess of a step is made from the target's hidden states of the last position that it
    has read, the others from the draft's own. What the draft has read is computed again, from the
    target's hidden states, where it is accepted: a pass over gamma positions without logits.
    """

    model: FlaxModel
    reads_history: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[str, ...]:
        """What is read of the target's decoder, and its encoder if it has one."""
        encoder = () if self.model.decoder_only else ("encoder",)
        return (*self.model.config.target_layers, *encoder)

    def start(self, params, inputs, cache_length, target) -> HiddenDraftState:
        """Projects the target's encoder output, or reads a prompt as the target has read it."""
        if not self.model.decoder_only:
            encoded = target.hidden["encoder"]
            hidden = jnp.zeros((len(inputs), 1, self.model.config.hidden_dim))
        else:
            encoded = self._of_target(target.hidden)
            last = (inputs != self.model.pad_id).sum(axis=1) - 1
            before = jnp.pad(encoded, ((0, 0), (1, 0), (0, 0)))
            hidden = jnp.take_along_axis(before, last[:, None, None], axis=1)
        state = self.model.start(params, inputs, cache_length, encoded).state
        return HiddenDraftState(state, hidden)

    def propose(
        self, params, state, last, uniforms, sampling, vocab_size, history=None
    ) -> Proposal:
        """Gamma steps of width 1."""
        logits, model, own = self.model.read_on(params, state.model, last[:, None], state.hidden)

        def read(state: tuple[Any, Array], newest: Rows) -> tuple[Logits, tuple[Any, Array]]:
            model, own = state
            logits, model, own = self.model.read_on(params, model, newest[:, None], own=own)
            return logits, (model, own)

        given = uniforms, sampling, vocab_size, history
        guesses, q, (model, _) = guess_on(self.model, logits, (model, own), read, *given)
        return Proposal(guesses, q, model)

    def follow(self, params, state, last, guesses) -> Any:
        """The state of a proposal of these guesses, which `commit` is to leave out."""
        return self.model.rewind(state.model, state.model.lengths + guesses.shape[1])

    def commit(self, params, proposal, accepted, hidden, left_out=None) -> HiddenDraftState:
        """Reads the accepted guesses again, with the target's hidden states.

        Rows may be left out [B], whose guesses are not the model's: it never reads `last` and the
        accepted ones. The next guess is made from the target's hidden states, which tell of them;
        it is accepted almost as often, and a step whose guesses are looked up costs no pass.
        """
        gamma = proposal.guesses.shape[1]
        read = proposal.state.lengths - (gamma - 1)  # With `last`, and without the guesses.
        of_target = self._of_target(hidden)
        newest = jnp.take_along_axis(of_target, accepted[:, None, None], axis=1)

        def read_again() -> Any:
            model, of_guesses = self.model.rewind(proposal.state, read), of_target[:, :gamma]
            return self.model.read_on(params, model, proposal.guesses, of_guesses)[1]

        if left_out is None:
            return HiddenDraftState(self.model.rewind(read_again(), read + accepted), newest)
        if proposal.q is None:
            model = lax.cond(left_out.all(), lambda: proposal.state, read_again)
        else:  # Looking up is rare above temperature 0: a branch would cost more than passes.
            model = read_again()
        lengths = jnp.where(left_out, read - 1, read + accepted)
        return HiddenDraftState(self.model.rewind(model, lengths), newest)

    def _of_target(self, hidden: dict[str, Array]) -> Array:
        """The hidden states of the target's decoder, side by side: [B, L, F]."""
        layers = [hidden[name] for name in self.model.config.target_layers]
        return jnp.concatenate(layers, axis=-1).astype(jnp.float32)


def model_draft(model: FlaxModel) -> HiddenDraft | TransformerDraft:
    """The draft of a model: it reads of its target what its configuration says."""
    if model.config.target_layers:
        return HiddenDraft(model)
    return TransformerDraft(model, model.config.source_dim > 0)
