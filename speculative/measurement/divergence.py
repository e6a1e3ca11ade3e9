"""The divergence between the probabilities of two models on given texts."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from speculative.grouping import batches, filled
from speculative.measurement import teacher_forced
from speculative.pair import Pair


def divergence(
    one: Pair, other: Pair, sources: Sequence[Array], texts: Sequence[Sequence[int]], batch: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Compares two targets of one vocabulary at each token of texts, which follow sources [1, S].

    Up to `batch` texts are read together.

    Returns:
        The Kullback-Leibler divergence [tokens] of the other's probabilities from the one's, in
        nats, at temperature 1; and whether the likeliest tokens are the same.
    """
    divergences, same = [], []
    size = max(map(len, texts))
    for chosen, places in batches(range(len(sources)), lambda i: sources[i].shape[1], batch):
        source = jnp.concatenate([sources[place] for place in places])
        rows = filled([texts[place] for place in places], size)
        scored = [
            teacher_forced.logits(pair.target, pair.params.target, source, rows)
            for pair in (one, other)
        ]
        compared = _compared(*scored, vocab_size=one.vocabulary.size)
        for place, kl, equal in zip(chosen, *map(np.asarray, compared), strict=False):
            divergences.append(kl[: len(texts[place])])
            same.append(equal[: len(texts[place])])
    return np.concatenate(divergences).astype(np.float64), np.concatenate(same)


@functools.partial(jax.jit, static_argnames="vocab_size")
def _compared(one: Array, other: Array, vocab_size: int) -> tuple[Array, Array]:
    """The divergence, and whether the argmax is the same, [B, L] each, of logits [B, L, V]."""
    p, q = (jax.nn.log_softmax(x[..., :vocab_size], axis=-1) for x in (one, other))
    return (jnp.exp(p) * (p - q)).sum(axis=-1), p.argmax(axis=-1) == q.argmax(axis=-1)
