"""Intervals against distributions known in closed form."""

import numpy as np
import pytest
from scipy import stats

from speculative.measurement.bootstrap import interval


@pytest.mark.parametrize(("ones", "size"), [(12, 48), (70, 100)])
def test_the_mean_of_resampled_ones_is_binomial(ones: int, size: int) -> None:
    values = np.arange(size) < ones
    low, high = interval(lambda chosen: values[chosen].mean(), size, seed=3)
    exact = stats.binom(size, ones / size).ppf([0.025, 0.975]) / size
    # 2,000 resamples put a percentile within one step of the lattice.
    np.testing.assert_allclose([low, high], exact, atol=1.01 / size)


def test_a_ratio_of_sums_resamples_whole_examples() -> None:
    """Where both sums stand in one ratio in every example, there is nothing to vary."""
    times = np.array([1.0, 5.0, 2.0, 9.0])
    low, high = interval(lambda chosen: 3 * times[chosen].sum() / times[chosen].sum(), 4)
    assert (low, high) == (3.0, 3.0)


def test_the_seed_decides() -> None:
    values = np.random.default_rng(0).normal(size=30)

    def mean(chosen: np.ndarray) -> float:
        return float(values[chosen].mean())

    assert interval(mean, 30, seed=1) == interval(mean, 30, seed=1)
    assert interval(mean, 30, seed=1) != interval(mean, 30, seed=2)


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        interval(lambda chosen: 0.0, 0)
