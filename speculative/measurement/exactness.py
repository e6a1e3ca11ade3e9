"""The first difference between autoregressive and speculative outputs at temperature 0."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray

from speculative.grouping import filled
from speculative.measurement import teacher_forced
from speculative.models import Config
from speculative.pair import Pair
from speculative.types import ROUNDED

SUMMED = 1024  # Products in a sum.


def rounding(largest: ArrayLike, config: Config, dtype: str | None = None) -> NDArray[np.float64]:
    """The largest margin of two logits that rounding may reverse, for logits of this magnitude.

    The rounding is that of `dtype`, by default the config's.

    Passes of different widths add the same products in different orders, in float32 whatever the
    dtype of the factors. Each of n additions is rounded, by a quarter of eps = 2^-23 on average and
    with independent signs, so that sums differ by about sqrt(n) / 4 times eps of their size. In
    bfloat16 a layer's result is then rounded to eight significant bits, where the smallest
    difference decides between neighbours that are eps = 2^-7 apart. Layers add independent
    differences, which grow with the square root of their number, and a logit is a sum over the
    features that have them. In random models of one to eight layers, another order of addition
    changes the margin between the two largest logits by a fifth of this bound in the root mean
    square, and by three quarters of it at most.
    """
    # Inputs that are rounded to int8 differ by steps of about bfloat16's.
    own = "bfloat16" if config.quantize == ROUNDED else config.dtype
    step, of_sums = (float(jnp.finfo(kind).eps) for kind in (dtype or own, "float32"))
    relative = config.decoder_layers**0.5 * (step + SUMMED**0.5 / 4 * of_sums)
    return np.asarray(largest, np.float64) * relative


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of two greedy outputs."""

    position: int
    autoregressive: int | None  # The token there; None after its text's end.
    speculative: int | None
    margin: float  # The largest logit minus the smaller logit of the two tokens.
    tolerance: float = 0.0  # From `rounding`; 0 after a text's end.

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: passes of different widths sum in different orders."""
        return self.margin < self.tolerance


def compare_greedy(
    pair: Pair,
    source: Array,
    tokens_autoregressive: Sequence[int],
    tokens_speculative: Sequence[int],
) -> Difference | None:
    """The first difference of two greedy outputs for source [1, S], by a teacher-forced pass."""
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
        largest = np.abs(there[np.isfinite(there)]).max()
        tolerance = float(rounding(largest, pair.target.config))
        return Difference(position, autoregressive, speculative, margin, tolerance)
    return None
