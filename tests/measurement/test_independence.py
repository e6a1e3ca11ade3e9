"""The fit against SciPy's tests, and its alarms against simulated texts."""

import numpy as np
import pytest
from scipy import stats

from speculative.measurement.independence import Independence, chi_square_tail, independence

FALSE_ALARM = 1e-6
"""Of each simulation below: how often a correct program would fail, were its seed not fixed."""


def decode(stands: np.ndarray, gamma: int) -> list[tuple[int, int]]:
    """Accepted and emitted of each step of a text, where `stands` says which guesses would."""
    steps, at = [], 0
    while at < len(stands):
        # What is guessed beyond the end always stands: it must not count.
        ahead = np.append(stands[at : at + gamma], [True] * gamma)[:gamma]
        accepted = int(np.cumprod(ahead).sum())
        steps.append((accepted, min(accepted + 1, len(stands) - at)))
        at += steps[-1][1]
    return steps


def measured(texts: list[np.ndarray], gamma: int) -> Independence:
    steps = [step for text in texts for step in decode(text, gamma)]
    accepted, emitted = zip(*steps, strict=True)
    return independence(accepted, emitted, gamma)


def alike(seed: int, alpha: float, texts: int, length: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).random((texts, length)) < alpha)


def by_difficulty(seed: int) -> list[np.ndarray]:
    """Texts each of its own rate, 0.4 or 0.9."""
    rng = np.random.default_rng(seed)
    return [rng.random(50) < rng.choice([0.4, 0.9]) for _ in range(48)]


def by_neighbour(seed: int) -> list[np.ndarray]:
    """A guess stands with probability 0.85 after one that would have, else with 0.4."""
    texts = np.random.default_rng(seed).random((48, 50))
    stands = texts < 0.7
    for i in range(1, 50):
        stands[:, i] = texts[:, i] < np.where(stands[:, i - 1], 0.85, 0.4)
    return list(stands)


def test_g_is_that_of_the_counts_of_tokens_per_step() -> None:
    """Steps 30, 22, 18 and 50 times of 1, 2, 3 and 4 tokens, none cut short."""
    counts, gamma = np.array([30, 22, 18, 50]), 3
    accepted = np.repeat(np.arange(4), counts)
    found = independence(accepted, accepted + 1, gamma)
    alpha = (22 + 2 * 18 + 3 * 50) / (120 + 90 + 68)
    assert found.alpha == pytest.approx(alpha)
    assert (found.tested, found.accepted) == ((120, 90, 68), (90, 68, 50))
    probabilities = [1 - alpha, alpha * (1 - alpha), alpha**2 * (1 - alpha), alpha**3]
    statistic, p_value = stats.power_divergence(
        counts, 120 * np.array(probabilities), ddof=1, lambda_="log-likelihood"
    )
    assert found.degrees == 2
    assert found.statistic == pytest.approx(statistic)
    assert found.p_value == pytest.approx(p_value)
    assert found.tokens_per_call == pytest.approx((30 + 44 + 54 + 200) / 120)


def test_alpha_is_the_likeliest() -> None:
    accepted = np.repeat(np.arange(4), [30, 22, 18, 50])
    rates = np.linspace(0.001, 0.999, 999)
    rejected = accepted < 3
    likelihood = [(accepted * np.log(rate) + rejected * np.log(1 - rate)).sum() for rate in rates]
    found = independence(accepted, accepted + 1, 3).alpha
    assert found == pytest.approx(rates[np.argmax(likelihood)], abs=0.0006)


def test_rare_places_share_a_cell() -> None:
    """At most 5 of 100 first guesses stand twice: places 2 to 4 are one cell."""
    accepted = np.repeat([0, 1, 2, 4], [60, 35, 3, 2])
    found = independence(accepted, accepted + 1, 4)
    table = [[40, 5 + 2 + 2], [60, 35 + 3 + 0]]
    statistic, p_value, *_ = stats.chi2_contingency(
        table, correction=False, lambda_="log-likelihood"
    )
    assert (found.tested, found.accepted) == ((100, 40, 5, 2), (40, 5, 2, 2))
    assert found.degrees == 1
    assert found.statistic == pytest.approx(statistic)
    assert found.p_value == pytest.approx(p_value)


def test_a_text_cut_short_counts_as_far_as_it_goes() -> None:
    # The first ends with an accepted guess, the second where its correction had no room, and
    # the third with a correction.
    found = independence([3, 1, 1], [2, 1, 2], 3)
    assert (found.tested, found.accepted) == ((3, 2, 0), (3, 1, 0))
    assert found.tokens_per_call == pytest.approx(5 / 3)
    assert (found.statistic, found.degrees, found.p_value) == (0.0, 0, None)


@pytest.mark.parametrize("accepted", [[0, 1] * 200, [0] * 50])
def test_one_cell_fits_any_distribution(accepted: list[int]) -> None:
    found = independence(accepted, np.array(accepted) + 1, 1)
    assert (found.degrees, found.p_value) == (0, None)


def test_headroom_of_the_oracle() -> None:
    accepted = np.repeat([0, 1, 2], [10, 6, 24])
    found = independence(accepted, accepted + 1, 2)
    assert found.oracle_tokens == pytest.approx(1 / (1 - 54 / 70))
    assert found.oracle_headroom == pytest.approx((70 / 16) / (94 / 40))
    assert independence([2, 2], [3, 3], 2).oracle_headroom == float("inf")


@pytest.mark.parametrize("degrees", [1, 2, 3, 6, 9, 40])
@pytest.mark.parametrize("statistic", [0.0, 1e-9, 0.3, 4.0, 31.0, 400.0])
def test_the_tail_is_scipys(statistic: float, degrees: int) -> None:
    expected = stats.chi2.sf(statistic, degrees)
    assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("alpha", "gamma", "texts", "length"), [(0.5, 3, 24, 9), (0.75, 7, 48, 50), (0.9, 10, 20, 30)]
)
def test_false_alarms_are_as_rare_as_stated(
    alpha: float, gamma: int, texts: int, length: int
) -> None:
    p = [measured(alike(seed, alpha, texts, length), gamma).p_value for seed in range(300)]
    alarms = sum(value is not None and value < 0.05 for value in p)
    low, high = stats.binom(300, 0.05).ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2])
    assert low <= alarms <= high


def test_independent_acceptances_are_not_rejected() -> None:
    found = measured(alike(1, 0.75, 48, 50), 7)
    assert found.p_value is not None and found.p_value > 0.05
    assert found.alpha == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("texts", [by_difficulty, by_neighbour])
def test_clustered_acceptances_are_rejected(texts) -> None:
    for seed in range(5):
        found = measured(texts(seed), 7)
        assert found.p_value is not None and found.p_value < 1e-3


@pytest.mark.parametrize(
    ("accepted", "emitted", "message"),
    [
        ([], [], "at least one step"),
        ([1, 2], [2], r"\(2,\) and \(1,\)"),
        ([0, 4], [1, 5], "gamma = 3 guesses, not from 0 to 4"),
        ([-1], [1], "from -1"),
        ([1], [3], "at most 1 more"),
        ([1], [0], "at least 1 token"),
    ],
)
def test_counts_that_are_not_of_steps(
    accepted: list[int], emitted: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        independence(accepted, emitted, 3)


def test_no_guesses_are_no_test() -> None:
    with pytest.raises(ValueError, match="must not be 0"):
        independence([0, 0], [1, 1], 0)
