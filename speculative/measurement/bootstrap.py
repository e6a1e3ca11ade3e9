"""Confidence intervals by resampling of examples."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


def interval(
    statistic: Callable[[NDArray[np.intp]], float], size: int, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap's 95% interval of a statistic over `size` examples.

    `statistic` maps the numbers [size] of the drawn examples, some repeated, to its value. Whole
    examples are drawn, because tokens of one text depend on each other. ValueError is raised
    without an example.
    """
    if size < 1:
        raise ValueError("An interval needs at least one example.")
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.integers(0, size, (RESAMPLES, size)))
    # Few examples have few distinct samples, each of which is drawn many times.
    samples, of = np.unique(drawn, axis=0, return_inverse=True)
    values = np.array([statistic(sample) for sample in samples])[of]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
