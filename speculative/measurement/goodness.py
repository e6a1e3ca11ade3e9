"""Tests of samples against the distribution that they should have come from."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXPECTED = 5  # The least expected counts of a cell; with fewer, G is not chi-square.
CELLS, PAIR_CELLS = 20, 6


@dataclasses.dataclass(frozen=True)
class GTest:
    """A comparison of the counts of `count` draws with those expected.

    `statistic` is G, or None if it is infinite: a token of probability 0 was drawn. `p_value` is
    the probability of such a G, or a larger one, from an exact decoder; if draws may come from
    another distribution (`allowing`), G's noncentrality is at most `allowed`.
    """

    name: str
    count: int
    statistic: float | None
    degrees: int
    p_value: float
    allowed: float = 0.0


def g_test(name: str, count: int, statistic: float, degrees: int) -> GTest:
    """The test of a statistic with its degrees of freedom; an infinite one fails at any level."""
    from scipy import stats  # Takes longer to import than all of this package.

    if not np.isfinite(statistic):
        return GTest(name, count, None, degrees, 0.0)
    return GTest(name, count, statistic, degrees, float(stats.chi2.sf(statistic, degrees or 1)))


def allowing(test: GTest, divergence: float) -> GTest:
    """The test of samples whose own distribution may differ from the one tested against.

    `divergence` is their Kullback-Leibler divergence in nats, summed over the draws. G then has a
    noncentral chi-square distribution whose noncentrality is at most twice that, whatever the cells
    are (by the data processing inequality).
    """
    from scipy import stats

    if not divergence or test.statistic is None:
        return test
    allowed = 2 * float(divergence)
    p_value = float(stats.ncx2.sf(test.statistic, test.degrees or 1, allowed))
    return dataclasses.replace(test, p_value=p_value, allowed=allowed)


def g_statistic(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, int]:
    """G = 2 sum O ln(O / E) and its degrees of freedom; cells with few expected counts are pooled.

    G is divided by Williams' correction, which takes its mean to that of the chi-square
    distribution: summed over hundreds of prompts, a small excess would look like a difference.
    G is infinite if a token of probability 0 was drawn.
    """
    from scipy import stats

    if observed[expected == 0].any():
        return np.inf, 1
    order, frequent = np.argsort(-expected), int((expected >= EXPECTED).sum())
    observed, expected = observed[order], expected[order]
    for cells in (frequent, frequent - 1):  # If pooled ones are too few, they join a frequent one.
        if cells >= 0 and expected[-1] < EXPECTED:
            observed = np.append(observed[:cells], observed[cells:].sum())
            expected = np.append(expected[:cells], expected[cells:].sum())
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0, 0
    count = expected.sum()
    correction = 1 + ((count / expected).sum() - 1) / (6 * count * degrees)
    g = float(stats.power_divergence(observed, expected, lambda_="log-likelihood").statistic)
    return max(0.0, g) / correction, degrees  # Rounding may take equal counts below 0.


def of_tokens(name: str, transformed: Sequence[NDArray[np.float64]]) -> GTest:
    """The G-test of every token's randomised PIT, by counts in `CELLS` cells of equal width.

    The PIT is a uniform number from the token's interval in the target's cumulative distribution
    after the text so far. Those of all tokens are uniform and independent if and only if every
    token is drawn from the target (Rosenblatt's transform). `transformed` holds them by text.
    """
    flat = np.concatenate(transformed)
    observed = np.histogram(flat.clip(0, 1), CELLS, (0, 1))[0].astype(float)
    expected = np.full(CELLS, len(flat) / CELLS)
    return g_test(name, len(flat), *g_statistic(observed, expected))


def of_pairs(name: str, transformed: Sequence[NDArray[np.float64]]) -> GTest:
    """The G-test of the PIT of each token but the first, by that of the token before it.

    Both fall into one of `PAIR_CELLS` cells of equal width; the later one is uniform whatever the
    earlier one was. The earlier one is not, for after an end of sequence there is no later one.
    """
    earlier, later = (
        np.concatenate([text[ends] for text in transformed]).clip(0, 1)
        for ends in (slice(None, -1), slice(1, None))
    )
    counts = np.histogram2d(earlier, later, PAIR_CELLS, [[0, 1], [0, 1]])[0]
    rows = [g_statistic(row, np.full(PAIR_CELLS, row.mean())) for row in counts if row.sum()]
    statistic, degrees = (sum(values) for values in zip(*rows, strict=True)) if rows else (0.0, 0)
    return g_test(name, len(later), statistic, int(degrees))
