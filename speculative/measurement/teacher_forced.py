"""Teacher-forced scoring: the target's logits on a given text."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.models.interface import Extended, Model, Started
from speculative.types import Inputs, Logits, PyTree, Rows, Tokens


def previous(tokens: Tokens, first: Rows) -> Array:
    """The token before each one: [B, L] -> [B, L], where `first` [B] comes before all."""
    return jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)


def padded(tokens: Sequence[int], length: int) -> np.ndarray:
    """A row [1, length] of tokens, with padding after them."""
    return np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)))[None]


def score(
    target: Model, params: PyTree, source: Inputs, tokens: Tokens, layers: tuple[str, ...] = ()
) -> tuple[Started, Extended]:
    """Reads texts [B, L] after sources [B, S] in one pass, by the cached step of decoding.

    Gives the results of the model's `start` and `extend`, with hidden states of `layers` and the
    logits [B, L, V] of each token, given those before it.
    """
    begun = target.start(params, source, tokens.shape[1], layers=layers)
    fed = previous(tokens, target.first(source))
    return begun, target.extend(params, begun.state, fed, layers=layers)


@functools.partial(jax.jit, static_argnames="target")
def logits(target: Model, params: PyTree, source: Inputs, tokens: Tokens) -> Logits:
    """Float32 logits [B, L, V] for each of `tokens` [B, L], given those before it."""
    return score(target, params, source, tokens)[1].logits
