"""The first difference between autoregressive and speculative outputs at temperature 0."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jax import Array

from speculative.grouping import filled
from speculative.measurement import teacher_forced
from speculative.pair import Pair

NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.25}
"""Margins between logits that rounding may reverse, by the dtype of products.

Bfloat16 has eight significant bits, so that logits of about 20 are rounded to multiples of 0.125.
"""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of two greedy outputs.

    Attributes:
        position: of the first tokens that differ; a token is None after its text's end.
        margin: the largest logit minus the smaller logit of the two tokens.
        tolerance: of `NEAR_TIES`.
    """

    position: int
    autoregressive: int | None
    speculative: int | None
    margin: float
    tolerance: float = NEAR_TIES["float32"]

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
        row = filled([tokens_autoregressive[:position]], length)
        logits = teacher_forced.logits(pair.target, pair.params.target, source, row)
        there = np.asarray(logits)[0, position, : pair.vocabulary.size]
        margin = float(there.max() - min(there[autoregressive], there[speculative]))
        return Difference(position, autoregressive, speculative, margin, NEAR_TIES[dtype])
    return None
