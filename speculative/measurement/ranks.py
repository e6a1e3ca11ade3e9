"""How often the target's token is a draft's first, second, ... choice, for building trees."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from speculative.decoding import Decoding, Params
from speculative.decoding.loop import Models
from speculative.decoding.programs import Program
from speculative.drafts import Proposal
from speculative.grouping import batches, filled
from speculative.measurement.alpha import Read, at_each, reading
from speculative.pair import Pair
from speculative.sampling import first
from speculative.tree import Growth
from speculative.types import Inputs, Rows, State, Tokens


def shares_on_target_text(
    pair: Pair,
    sources: Sequence[Array],
    tokens: Sequence[Sequence[int]],
    draws: Sequence[Array],
    config: Decoding,
    batch_size: int = 1,
) -> NDArray[np.float64]:
    """The shares [R] of the target's tokens that are the draft's r-th choice, R = 8.

    Sources are [1, S]; the outputs, with their end of sequence, were decoded with the random
    numbers `draws` of `Decoding.draws`, from which coupled verification makes its noise.
    """
    alone = Models(pair.target, None), Params(pair.params.target)
    counts, layers = np.zeros(Growth.BRANCHES + 1), pair.draft.layers
    for chosen, places in batches(range(len(sources)), lambda i: sources[i].shape[1], batch_size):
        source = jnp.concatenate([sources[place] for place in places])
        rows = jnp.asarray(filled([tokens[place] for place in places], config.max_length))
        own = jnp.concatenate([draws[place] for place in places])
        read = reading(*alone, source, rows, layers)
        inputs = Models(pair.target, pair.draft), pair.params, source, rows, own, read
        for place, row in zip(chosen, np.asarray(ranks(*inputs, config)), strict=False):
            counts += np.bincount(row[: len(tokens[place])], minlength=len(counts))
    return counts[:-1] / counts.sum()


@Program
def ranks(
    models: Models,
    params: Params,
    source: Inputs,
    tokens: Tokens,
    draws: Array,
    read: Read,
    config: Decoding,
) -> Array:
    """The place [B, L] of each of tokens [B, L] among the draft's guesses, from 0; 8 if absent."""
    draft, growth = models.draft, Growth(Growth.BRANCHES, 1)
    assert draft is not None, "only a draft makes guesses"
    first_place = jnp.zeros((len(tokens), 2), jnp.int32)

    def rank(state: State, last: Rows, here: tuple[Rows, Rows]) -> tuple[Proposal, Array]:
        token, length = here
        noise = None
        if not config.sampling.greedy:
            noise = config.step_draws(draws, length)[:, :1]
        how = config.sampling, config.vocab_size, growth
        proposal = draft.grow(params.draft, state, last, noise, *how)
        return proposal.along(first_place), first(proposal.guesses == token[:, None])

    lengths = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    room = 2 + growth.nodes  # A mixed draft reads all of the tree.
    return at_each(models, params, source, tokens, read, rank, (tokens, lengths), room)
