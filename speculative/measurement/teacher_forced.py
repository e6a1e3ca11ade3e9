"""Teacher-forced scoring: the target's logits on a given text."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from speculative.models.interface import Chunk, Extended, Model, Started
from speculative.types import Inputs, Logits, PyTree, Rows, Tokens


def previous(tokens: Tokens, first: Rows) -> Array:
    """The token before each one: [B, L] -> [B, L], where `first` [B] comes before all."""
    return jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)


def score(
    target: Model,
    params: PyTree,
    source: Inputs,
    tokens: Tokens,
    layers: tuple[str, ...] = (),
    rows: Rows | None = None,
) -> tuple[Started, Extended]:
    """Reads texts [B, L] after sources [B, S] in one pass, by the cached step of decoding.

    If texts share sources, these are [U, S], and `rows` [B] is the source that each text follows.
    Returns the results of the model's `start` and `extend`, with hidden states of `layers` and the
    logits [B, L, V] of each token, given those before it.
    """
    begun = target.start(params, source, tokens.shape[1], layers=layers)
    state, first = begun.state, target.first(source)
    if rows is not None:
        state, first = jax.tree.map(lambda x: x[rows], (state, first))
    return begun, target.extend(params, state, Chunk(previous(tokens, first)), layers=layers)


@functools.partial(jax.jit, static_argnames="target")
def logits(target: Model, params: PyTree, source: Inputs, tokens: Tokens) -> Logits:
    """Float32 logits [B, L, V] for each of `tokens` [B, L], given those before it; see `score`."""
    return score(target, params, source, tokens)[1].logits
