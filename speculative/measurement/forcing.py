"""The target's logits on a given text, by teacher forcing."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.decoding.speculative import Model
from speculative.types import Inputs, Logits, PyTree, Rows, Tokens


def previous(tokens: Tokens, first: Rows) -> Array:
    """What each token follows: [B, L] -> [B, L], where `first` [B] comes before them."""
    return jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)


def padded(tokens: Sequence[int], length: int) -> np.ndarray:
    """A row [1, length] of tokens, with padding after them."""
    return np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)))[None]


@functools.partial(jax.jit, static_argnames="target")
def logits(target: Model, params: PyTree, source: Inputs, tokens: Tokens) -> Logits:
    """Float32 logits [B, L, V] for each of `tokens` [B, L], given those before it.

    One pass over the whole text, through the same cached step that decoding uses.
    """
    state = target.start(params, source, tokens.shape[1])
    return target.extend(params, state, previous(tokens, target.first(source)))[0]
