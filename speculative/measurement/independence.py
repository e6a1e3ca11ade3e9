"""Whether acceptances are independent and alike, as Equation 1 assumes (sections 3.1 and 3.5)."""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speculative import theory

EXPECTED = 5
"""Acceptances and rejections that a cell must lead one to expect; the law of G holds no lower."""


@dataclasses.dataclass(frozen=True)
class Independence:
    """A geometric law capped at gamma + 1, fitted to the tokens of each step, and how well it fits.

    Attributes:
        tested: [gamma] steps whose first guess, second guess and so on were tested.
        accepted: [gamma] how many of those guesses stood.
        tokens_per_call: tokens that a target pass yielded.
        statistic: G, 0 where the counts are those expected.
        degrees: of freedom of its law, one less than the cells compared.
        p_value: the chance of such a G or a larger one where acceptances are independent and
            alike; None where the counts fill fewer than two cells, for those fit any law.
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
    """Fits one acceptance rate to all steps and tests it by the place of a guess in its step.

    If acceptances are independent and alike, a guess that is tested stands with the same
    probability whether it is the first of its step or the last. The likelihood of the tokens of
    a step is the product of these tests, so G = 2 sum O ln(O / E) over the accepted and the
    rejected at each place is that of the counts of 1, 2, ... gamma + 1 tokens against the fitted
    law; and a step that its text's end cuts short counts for the tests that it made. Neighbouring
    places share a cell until at least `EXPECTED` acceptances and rejections are expected in it.

    False alarms: where the law holds, p falls below a level about as often as the level says; of
    12,000 simulated measurements, of 10 to 48 texts each, 5.5% fell below 0.05 and 1.2% below
    0.01. Who looks at many rows needs a lower level for each. What is tested is the shape of the
    counts, not the order of steps.

    Args:
        accepted: [steps] guesses that stand, from 0 to gamma.
        emitted: [steps] tokens given to the output: accepted + 1, fewer where the text ends.
        gamma: guesses of a step, at least 1.

    Raises:
        ValueError: there is no step, or the counts are not those of steps.
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
    place = np.arange(1, gamma + 1)[:, None]
    # What was verified after the end of a text is no part of it.
    tested = (np.minimum(accepted + 1, emitted) >= place).sum(axis=1)
    stood = (np.minimum(accepted, emitted) >= place).sum(axis=1)
    statistic, degrees = _by_place(tested, stood)
    return Independence(
        tuple(tested.tolist()),
        tuple(stood.tolist()),
        float(emitted.mean()),
        statistic,
        degrees,
        chi_square_tail(statistic, degrees) if degrees else None,
    )


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The chance that a chi-square variable exceeds a value.

    Adds up Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1), the incomplete gamma function's
    recurrence; its terms are positive, so no digits are lost.

    Args:
        statistic: the value, 0 or more.
        degrees: of freedom, at least 1.
    """
    x = statistic / 2
    if x <= 0:
        return 1.0
    a, tail = (0.5, math.erfc(math.sqrt(x))) if degrees % 2 else (1.0, math.exp(-x))
    while a < degrees / 2:
        tail += math.exp(a * math.log(x) - x - math.lgamma(a + 1))
        a += 1
    return tail


def likelihood_ratio(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """G = 2 sum O ln(O / E) of counts against what was expected of them, all above 0."""
    # 0 ln 0 is 0. Equal counts may come out a rounding below nothing.
    logs = np.log(np.where(observed > 0, observed / expected, 1.0))
    return max(0.0, float(2 * (observed * logs).sum()))


def _by_place(tested: NDArray[np.int_], accepted: NDArray[np.int_]) -> tuple[float, int]:
    """G and its degrees of freedom for counts [gamma] by place, after pooling."""
    rates = np.array([accepted.sum(), (tested - accepted).sum()]) / tested.sum()
    cells, pool = [], np.zeros(2)
    for outcomes in np.stack([accepted, tested - accepted], axis=1):
        pool = pool + outcomes
        if pool.sum() * rates.min() >= EXPECTED:
            cells.append(pool)
            pool = np.zeros(2)
    if not cells:
        return 0.0, 0
    cells[-1] = cells[-1] + pool
    observed = np.array(cells)
    expected = observed.sum(axis=1, keepdims=True) * rates
    return likelihood_ratio(observed, expected), len(cells) - 1
