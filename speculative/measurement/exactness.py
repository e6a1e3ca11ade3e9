"""At temperature 0 both ways of decoding give one text; where they do not, why."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jax import Array

from speculative.measurement import forcing
from speculative.pair import Pair

NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.25}
"""Margins between logits that sums in another order may turn round, by the dtype of products.

Bfloat16 keeps eight bits, so that logits of about 20 come out a tenth apart.
"""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part.

    Attributes:
        position: of the first token that differs.
        autoregressive: the token there, decoded plainly; None beyond the text's end.
        speculative: the token there, decoded speculatively; None beyond the text's end.
        margin: how far the logit of the less likely of the two lies below the largest one.
        tolerance: of `NEAR_TIES`.
    """

    position: int
    autoregressive: int | None
    speculative: int | None
    margin: float
    tolerance: float = NEAR_TIES["float32"]

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: a pass of another width sums in another order."""
        return self.margin < self.tolerance


def compare_greedy(
    pair: Pair,
    source: Array,
    tokens_autoregressive: Sequence[int],
    tokens_speculative: Sequence[int],
    dtype: str = "float32",
) -> Difference | None:
    """The first difference of two greedy outputs for source [1, S], or None.

    The margin comes from a fresh pass of the target over the text up to there; `dtype` is that of
    the target's products.
    """
    both = itertools.zip_longest(tokens_autoregressive, tokens_speculative)
    for position, (plain, speculative) in enumerate(both):
        if plain == speculative:
            continue
        if plain is None or speculative is None:  # One ended with no token to show for it.
            return Difference(position, plain, speculative, math.inf)
        length = -(-(position + 1) // 32) * 32
        row = forcing.padded(tokens_autoregressive[:position], length)
        logits = forcing.logits(pair.target, pair.params.target, source, row)
        there = np.asarray(logits)[0, position, : pair.vocabulary.size]
        margin = there.max() - min(there[plain], there[speculative])
        return Difference(position, plain, speculative, float(margin), NEAR_TIES[dtype])
    return None
