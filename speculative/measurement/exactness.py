"""The first difference between autoregressive and speculative outputs at temperature 0."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray

from speculative.measurement import teacher_forced
from speculative.pair import Pair

SUMMED = 1024  # Products in a sum.


def rounding(largest: ArrayLike, dtype: str) -> NDArray[np.float64]:
    """The margins between logits that rounding may reverse, by the largest magnitude of a logit.

    Passes of different widths add the same products in other orders, in float32 whatever the dtype
    of the factors. Two orders of n terms differ by sqrt(n) steps of float32, a random walk; a step
    is eps = 2^-23 of the largest. In bfloat16 each layer's result is then rounded to eight
    significant bits, and the least difference decides between neighbours, which are eps = 2^-7
    apart. The signs are independent, and a logit is a sum over all features, so that it moves by a
    step of the largest logit at most; two logits move towards each other by two. Between the widths
    1, 3, 8 and 64, no logit of the shipped models moves by more than 0.65 steps of bfloat16 or 6.6
    of float32.
    """
    eps = [float(jnp.finfo(kind).eps) for kind in (dtype, "float32")]
    return 2 * np.asarray(largest, np.float64) * (eps[0] + SUMMED**0.5 * eps[1])


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of two greedy outputs.

    Attributes:
        position: of the first tokens that differ; a token is None after its text's end.
        margin: the largest logit minus the smaller logit of the two tokens.
        tolerance: of `rounding`; 0 after a text's end.
    """

    position: int
    autoregressive: int | None
    speculative: int | None
    margin: float
    tolerance: float = 0.0

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: passes of different widths sum in different orders."""
        return self.margin < self.tolerance


def compare_greedy(
    pair: Pair,
    source: Array,
    tokens_autoregressive: Sequence[int],
    tokens_speculative: Sequence[int],
    dtype: str,
) -> Difference | None:
    """The first difference of two greedy outputs for source [1, S], or None.

    The margin comes from a teacher-forced pass; `dtype` is that of the target's products.
    """
    both = itertools.zip_longest(tokens_autoregressive, tokens_speculative)
    for position, (autoregressive, speculative) in enumerate(both):
        if autoregressive == speculative:
            continue
        if autoregressive is None or speculative is None:  # One text is a prefix of the other.
            return Difference(position, autoregressive, speculative, math.inf)
        length = -(-(position + 1) // 32) * 32  # One program serves 32 positions.
        row = teacher_forced.padded(tokens_autoregressive[:position], length)
        logits = teacher_forced.logits(pair.target, pair.params.target, source, row)
        there = np.asarray(logits)[0, position, : pair.vocabulary.size]
        margin = float(there.max() - min(there[autoregressive], there[speculative]))
        largest = np.abs(there[np.isfinite(there)]).max()
        tolerance = float(rounding(largest, dtype))
        return Difference(position, autoregressive, speculative, margin, tolerance)
    return None
