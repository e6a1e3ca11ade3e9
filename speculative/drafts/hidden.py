"""A small model as a draft that reads the target's hidden states (EAGLE, arXiv 2401.15077)."""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

from speculative.drafts.base import Draft, Proposal
from speculative.drafts.growing import Level
from speculative.drafts.transformer import TransformerDraft, grow_on, guess_on
from speculative.models import FlaxModel
from speculative.models.interface import Chunk
from speculative.types import Logits, Rows, State


@struct.dataclass
class HiddenDraftState:
    """A model that has read all tokens but the newest, each with its predecessor's states."""

    model: State
    hidden: Array  # [B, 1, F] the target's, at the newest token's predecessor; 0 before the first.


@dataclasses.dataclass(frozen=True)
class HiddenDraft(Draft):
    """Drafts autoregressively with a model that reads `Reads.target_layers`.

    The first guess of a step uses the target's hidden states at the last position that it has read,
    the others use the draft's own. The draft then rereads the positions that the target has read,
    with the target's hidden states: a pass over gamma + 1 positions without logits.
    """

    model: FlaxModel
    grows = True

    @property
    def max_positions(self) -> int:
        """The model's limit."""
        return self.model.max_positions

    @property
    def layers(self) -> tuple[str, ...]:
        """The target's decoder layers that the draft reads, and its encoder if it has one."""
        encoder = () if self.model.decoder_only else ("encoder",)
        return (*self.model.config.reads.target_layers, *encoder)

    def start(self, params, inputs, cache_length, target) -> HiddenDraftState:
        """Projects the target's encoder output, or reads a prompt with the target's states."""
        if not self.model.decoder_only:
            encoded = target.hidden["encoder"]
            hidden = jnp.zeros((len(inputs), 1, self.model.config.reads.hidden_dim))
        else:
            encoded = self._of_target(target.hidden)
            last = (inputs != self.model.pad_id).sum(axis=1) - 1
            before = jnp.pad(encoded, ((0, 0), (1, 0), (0, 0)))
            hidden = jnp.take_along_axis(before, last[:, None, None], axis=1)
        state = self.model.start(params, inputs, cache_length, encoded).state
        return HiddenDraftState(state, hidden)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Makes gamma steps of width 1."""
        logits, model, own = self.model.read_on(
            params, state.model, Chunk(last[:, None]), state.hidden
        )

        def read(state: tuple[State, Array], newest: Rows) -> tuple[Logits, tuple[State, Array]]:
            model, own = state
            logits, model, own = self.model.read_on(params, model, Chunk(newest[:, None]), own=own)
            return logits, (model, own)

        guesses, q, (model, _) = guess_on(
            self.model, logits, (model, own), read, numbers, sampling, vocab_size, history
        )
        model = self.model.rewind(model, state.model.lengths)
        return Proposal(guesses, q, (HiddenDraftState(model, state.hidden), last))

    def grow(
        self, params, state, last, noise, sampling, vocab_size, growth, history=None
    ) -> Proposal:
        """Makes a pass per level but the last; each node reads its parent's hidden state."""
        chunk = Chunk(last[:, None])
        logits, model, own = self.model.read_on(params, state.model, chunk, state.hidden)
        own = jnp.broadcast_to(own, (len(last), growth.WIDTH, own.shape[2]))

        def read(state: tuple[State, Array], level: Level) -> tuple[Logits, tuple[State, Array]]:
            model, own = state
            own = jnp.take_along_axis(own, level.parents[..., None], axis=1)
            logits, model, own = self.model.read_on(params, model, level.chunk, own=own)
            return logits, (model, own)

        grown = grow_on(
            self.model, logits, (model, own), read, noise, sampling, vocab_size, growth, history
        )
        model = self.model.rewind(grown.state[0], state.model.lengths)
        state = HiddenDraftState(model, state.hidden)
        return Proposal(grown.guesses, None, (state, last), grown.tree)

    def follow(self, params, state, last, guesses) -> tuple[HiddenDraftState, Rows]:
        """The state after proposing these guesses, which `commit` reads."""
        return state, last

    def follow_tree(self, params, state, last, guesses, tree) -> tuple[HiddenDraftState, Rows]:
        """The state after proposing a tree of guesses, which `commit` reads."""
        return state, last

    def commit(self, params, proposal, accepted, hidden) -> HiddenDraftState:
        """Reads the tokens that the target has read, with the target's hidden states."""
        before, last = proposal.state
        of_target = self._of_target(hidden)
        previous = jnp.concatenate([before.hidden, of_target[:, :-1]], axis=1)
        model = self.model.read_on(params, before.model, proposal.chunk(last), previous)[1]
        model = self.model.rewind(model, before.model.lengths + accepted + 1)
        newest = jnp.take_along_axis(of_target, accepted[:, None, None], axis=1)
        return HiddenDraftState(model, newest)

    def _of_target(self, hidden: dict[str, Array]) -> Array:
        """The hidden states of the target's decoder, side by side: [B, L, F]."""
        layers = [hidden[name] for name in self.model.config.reads.target_layers]
        return jnp.concatenate(layers, axis=-1).astype(jnp.float32)


def model_draft(model: FlaxModel) -> HiddenDraft | TransformerDraft:
    """The draft of a model, which reads its target as its configuration says."""
    if model.config.reads.target_layers:
        return HiddenDraft(model)
    return TransformerDraft(model, model.config.reads.source_dim > 0)
