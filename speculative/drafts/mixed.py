"""A model and the text itself as one draft: a step copies where the text goes on as before."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from speculative.drafts.base import Draft, Proposal
from speculative.drafts.copying import CopyDraft
from speculative.drafts.growing import as_tree
from speculative.drafts.hidden import HiddenDraft
from speculative.drafts.suffix import SuffixDraft
from speculative.drafts.transformer import TransformerDraft
from speculative.tree import Tree
from speculative.types import State


@dataclasses.dataclass(frozen=True)
class MixedDraft(Draft):
    """Looks up what followed where a row's end occurred before, or else guesses with a model.

    A row's choice depends on its text alone, not on random numbers, so that q is that of the draft
    which is taken. Where every row looks up, the model guesses nothing.
    Its parameters and its state are pairs, of the model and of the lookup.
    """

    model: TransformerDraft | HiddenDraft
    lookup: CopyDraft | SuffixDraft
    grows = True
    asks: bool = False  # Whether the model guesses whatever the text, to time what it costs.

    @property
    def layers(self) -> tuple[str, ...]:
        """What the model reads of the target."""
        return self.model.layers

    @property
    def max_positions(self) -> int:
        """Of the model."""
        return self.model.max_positions

    def start(self, params, inputs, cache_length, target) -> State:
        """Starts both."""
        given = inputs, cache_length, target
        return self.model.start(params[0], *given), self.lookup.start(params[1], *given)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Asks the model unless every row knows how its text goes on."""
        (of_model, of_lookup), (model, lookup) = params, state
        given = last, numbers, sampling, vocab_size
        known = self.lookup.sure(of_lookup, lookup, last, vocab_size, sampling) & (not self.asks)

        def look_up() -> tuple[Array, Array | None, State]:
            found = self.lookup.propose(of_lookup, lookup, *given)
            drawn = numbers.ndim == 2 and not sampling.greedy  # From a q, which is one-hot here.
            q = jax.nn.one_hot(found.guesses, vocab_size) if drawn else None
            read = self.model.follow(of_model, model, last, found.guesses)
            return found.guesses, q, (read, found.state)

        def ask() -> tuple[Array, Array | None, State]:
            guesses, q, read, *_ = self.model.propose(of_model, model, *given, history)
            if len(last) > 1:  # Beside rows that ask there may be rows that look up.
                found, certain, _ = look_up()
                guesses = jnp.where(known[:, None], found, guesses)
                if q is not None and certain is not None:
                    q = jnp.where(known[:, None, None], certain, q)
                read = self.model.follow(of_model, model, last, guesses)
            return guesses, q, (read, self.lookup.follow(of_lookup, lookup, last, guesses))

        return Proposal(*lax.cond(known.all(), look_up, ask))

    def grow(
        self, params, state, last, noise, sampling, vocab_size, growth, history=None
    ) -> Proposal:
        """The model's tree unless every row knows how its text goes on, by a chain."""
        (of_model, of_lookup), (model, lookup) = params, state
        given = last, jnp.zeros((len(last), growth.depth)), sampling, vocab_size
        known = self.lookup.sure(of_lookup, lookup, last, vocab_size, sampling) & (not self.asks)

        def look_up() -> tuple[Array, Tree, State]:
            found = self.lookup.propose(of_lookup, lookup, *given)
            guesses, tree = as_tree(found.guesses, growth)
            return guesses, tree, self.model.follow_tree(of_model, model, last, guesses, tree)

        def ask() -> tuple[Array, Tree, State]:
            how = sampling, vocab_size, growth, history
            found = self.model.grow(of_model, model, last, noise, *how)
            assert found.tree is not None
            if len(last) == 1:
                return found.guesses, found.tree, found.state
            # Beside rows that ask there may be rows that look up.
            chains = as_tree(self.lookup.propose(of_lookup, lookup, *given).guesses, growth)
            guesses, tree = jax.tree.map(
                lambda one, other: jnp.where(known[:, None], one, other),
                chains,
                (found.guesses, found.tree),
            )
            return guesses, tree, self.model.follow_tree(of_model, model, last, guesses, tree)

        guesses, tree, read = lax.cond(known.all(), look_up, ask)
        return Proposal(guesses, None, (read, (lookup, last)), tree)

    def commit(self, params, proposal, accepted, hidden) -> State:
        """Commits both, which have read the same guesses; a tree's path the lookup reads now."""
        (of_model, of_lookup), (model, lookup) = params, proposal.state
        if proposal.path is not None:
            before, last = lookup
            lookup = self.lookup.follow(of_lookup, before, last, proposal.guesses)
        return (
            self.model.commit(of_model, proposal._replace(state=model), accepted, hidden),
            self.lookup.commit(of_lookup, proposal._replace(state=lookup), accepted, hidden),
        )
