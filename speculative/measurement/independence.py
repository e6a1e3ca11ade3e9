"""Whether acceptances are i.i.d., as Equation 1 assumes (sections 3.1 and 3.5)."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speculative import theory

EXPECTED = 5  # The least expected counts of a cell; with fewer, G is not chi-square.


@dataclasses.dataclass(frozen=True)
class Independence:
    """A geometric distribution capped at gamma + 1, fitted to tokens a step, and how well it fits.

    Attributes:
        tested: [gamma] guesses tested at each position of a step.
        accepted: [gamma] how many of them were accepted.
        tokens_per_call: tokens that a target pass yielded.
        statistic: G, 0 where the counts are those expected.
        degrees: of freedom of G, one less than the cells compared.
        p_value: the probability of such a G or a larger one if acceptances are i.i.d.; None where
            the counts fill fewer than two cells, which any distribution fits.
    """

    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_per_call: float
    statistic: float
    degrees: int
    p_value: float | None

    @property
    def alpha(self) -> float:
        """The likeliest acceptance rate: guesses accepted over guesses tested."""
        return sum(self.accepted) / sum(self.tested)

    @property
    def oracle_tokens(self) -> float:
        """Tokens a pass would yield were gamma always the number acceptable (section 3.5)."""
        return theory.oracle_tokens(self.alpha)

    @property
    def oracle_headroom(self) -> float:
        """`oracle_tokens` over `tokens_per_call`: what no choice of gamma can exceed."""
        return self.oracle_tokens / self.tokens_per_call


def independence(accepted: ArrayLike, emitted: ArrayLike, gamma: int) -> Independence:
    """Fits one acceptance rate to all steps and tests it by the position of a guess in its step.

    If acceptances are i.i.d., a guess that is tested is accepted with the same probability
    whether it is the first of its step or the last. The likelihood of the tokens of a step is the
    product over its guesses, so G over the accepted and the rejected at each position is that of
    the counts of 1, 2, ... gamma + 1 tokens against the fitted distribution; a step that its
    text's end cuts short counts for the guesses that it tested. Neighbouring positions share a
    cell until at least `EXPECTED` acceptances and rejections are expected in it.

    If acceptances are i.i.d., p falls below a level about as often as the level says: of 12,000
    simulated measurements, of 10 to 48 texts each, 5.5% fell below 0.05 and 1.2% below 0.01. Only
    the counts are tested, not the order of steps.

    Args:
        accepted: [steps] guesses accepted, from 0 to gamma.
        emitted: [steps] tokens given to the output: accepted + 1, fewer where the text ends.
        gamma: guesses of a step, at least 1; other counts raise ValueError.
    """
    accepted, emitted = np.asarray(accepted), np.asarray(emitted)
    if accepted.ndim != 1 or accepted.shape != emitted.shape or not accepted.size:
        raise ValueError(
            "Independence needs the counts of at least one step, accepted and emitted of one "
            f"shape [steps], not {accepted.shape} and {emitted.shape}."
        )
    if gamma < 1:
        raise ValueError(f"Without guesses there is nothing to test: gamma must not be {gamma}.")
    if accepted.min() < 0 or accepted.max() > gamma:
        raise ValueError(
            f"A step accepts from 0 to gamma = {gamma} guesses, not from {accepted.min()} to "
            f"{accepted.max()}."
        )
    if emitted.min() < 1 or (emitted > accepted + 1).any():
        raise ValueError("A step emits at least 1 token, and at most 1 more than it accepts.")
    position = np.arange(1, gamma + 1)[:, None]
    # What was verified after the end of a text is no part of it.
    tested = (np.minimum(accepted + 1, emitted) >= position).sum(axis=1)
    passed = (np.minimum(accepted, emitted) >= position).sum(axis=1)
    statistic, degrees = _by_position(tested, passed)
    p_value = chi_square_tail(statistic, degrees) if degrees else None
    counts = tuple(tested.tolist()), tuple(passed.tolist())
    return Independence(*counts, float(emitted.mean()), statistic, degrees, p_value)


def likelihood_ratio(observed: ArrayLike, expected: ArrayLike) -> float:
    """G = 2 sum O ln(O / E) of counts against what was expected of them, all above 0."""
    from scipy import stats  # Takes longer to import than all of this package.

    found = stats.power_divergence(np.ravel(observed), np.ravel(expected), lambda_="log-likelihood")
    return max(0.0, float(found.statistic))  # Equal counts may come out a rounding below 0.


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The probability that a chi-square variable of so many degrees of freedom exceeds a value."""
    from scipy import stats

    return float(stats.chi2.sf(statistic, degrees))


def _by_position(tested: NDArray[np.int_], accepted: NDArray[np.int_]) -> tuple[float, int]:
    """G and its degrees of freedom for counts [gamma] by position, after pooling."""
    outcomes = np.stack([accepted, tested - accepted], axis=1)
    rates = outcomes.sum(axis=0) / tested.sum()
    cells, pool = [], np.zeros(2)
    for outcome in outcomes:
        pool = pool + outcome
        if pool.sum() * rates.min() >= EXPECTED:
            cells.append(pool)
            pool = np.zeros(2)
    if not cells:
        return 0.0, 0
    cells[-1] = cells[-1] + pool
    observed = np.array(cells)
    expected = observed.sum(axis=1, keepdims=True) * rates
    return likelihood_ratio(observed, expected), len(cells) - 1
