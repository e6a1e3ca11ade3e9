"""A model and a lookup as one draft: a step copies where the text repeats itself."""

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
    """Copies what followed where the end of a row's text occurred before; else asks a model.

    A row's choice depends only on its text, not on random numbers, so q is that of the chosen
    draft. If every row looks up, the model makes no guesses. Parameters and state of this draft are
    pairs, of the model's and the lookup's.
    """

    model: TransformerDraft | HiddenDraft
    lookup: CopyDraft | SuffixDraft
    grows = True
    asks: bool = False  # Whether the model always guesses, to time its cost.

    @property
    def layers(self) -> tuple[str, ...]:
        """The target layers that the model reads."""
        return self.model.layers

    @property
    def max_positions(self) -> int:
        """The model's limit."""
        return self.model.max_positions

    def start(self, params, inputs, cache_length, target) -> State:
        """Starts both."""
        arguments = inputs, cache_length, target
        return self.model.start(params[0], *arguments), self.lookup.start(params[1], *arguments)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Asks the model unless the lookup is sure of every row."""
        (of_model, of_lookup), (model, lookup) = params, state
        arguments = last, numbers, sampling, vocab_size
        known = self.lookup.sure(of_lookup, lookup, last, vocab_size, sampling) & (not self.asks)

        def look_up() -> tuple[Array, Array | None, State]:
            copied = self.lookup.propose(of_lookup, lookup, *arguments)
            drawn = numbers.ndim == 2 and not sampling.greedy  # From a q, which is one-hot here.
            q = jax.nn.one_hot(copied.guesses, vocab_size) if drawn else None
            read = self.model.follow(of_model, model, last, copied.guesses)
            return copied.guesses, q, (read, copied.state)

        def ask() -> tuple[Array, Array | None, State]:
            guesses, q, read, *_ = self.model.propose(of_model, model, *arguments, history)
            if len(last) > 1:  # Other rows may look up.
                copied, certain, _ = look_up()
                guesses = jnp.where(known[:, None], copied, guesses)
                if q is not None and certain is not None:
                    q = jnp.where(known[:, None, None], certain, q)
                read = self.model.follow(of_model, model, last, guesses)
            return guesses, q, (read, self.lookup.follow(of_lookup, lookup, last, guesses))

        return Proposal(*lax.cond(known.all(), look_up, ask))

    def grow(
        self, params, state, last, noise, sampling, vocab_size, growth, history=None
    ) -> Proposal:
        """The model's tree, or the lookup's chain if the lookup is sure of every row."""
        (of_model, of_lookup), (model, lookup) = params, state
        arguments = last, jnp.zeros((len(last), growth.depth)), sampling, vocab_size
        known = self.lookup.sure(of_lookup, lookup, last, vocab_size, sampling) & (not self.asks)

        def look_up() -> tuple[Array, Tree, State]:
            copied = self.lookup.propose(of_lookup, lookup, *arguments)
            guesses, tree = as_tree(copied.guesses, growth)
            return guesses, tree, self.model.follow_tree(of_model, model, last, guesses, tree)

        def ask() -> tuple[Array, Tree, State]:
            how = sampling, vocab_size, growth, history
            grown = self.model.grow(of_model, model, last, noise, *how)
            assert grown.tree is not None
            if len(last) == 1:
                return grown.guesses, grown.tree, grown.state
            # Other rows may look up.
            chains = as_tree(self.lookup.propose(of_lookup, lookup, *arguments).guesses, growth)
            guesses, tree = jax.tree.map(
                lambda one, other: jnp.where(known[:, None], one, other),
                chains,
                (grown.guesses, grown.tree),
            )
            return guesses, tree, self.model.follow_tree(of_model, model, last, guesses, tree)

        guesses, tree, read = lax.cond(known.all(), look_up, ask)
        return Proposal(guesses, None, (read, (lookup, last)), tree)

    def commit(self, params, proposal, accepted, hidden) -> State:
        """Commits both, which have read the same guesses; the lookup reads a tree's path now."""
        (of_model, of_lookup), (model, lookup) = params, proposal.state
        if proposal.path is not None:
            before, last = lookup
            lookup = self.lookup.follow(of_lookup, before, last, proposal.guesses)
        return (
            self.model.commit(of_model, proposal._replace(state=model), accepted, hidden),
            self.lookup.commit(of_lookup, proposal._replace(state=lookup), accepted, hidden),
        )
