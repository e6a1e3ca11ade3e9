"""The paper's equations in closed form, float64, and what we add to them.

Symbols: alpha is the expected acceptance rate, gamma the guesses of a step (0 is plain decoding),
c the time of one draft step over that of one target step, and v, `verify_cost`, the time of a
target pass over gamma + 1 positions over that of one position. All ratios are without unit.
Equation, theorem and section numbers are those of arXiv 2211.17192v2.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def divergence(p: ArrayLike, q: ArrayLike) -> Float64:
    """D_LK, the distance between two distributions that one rejection rate measures (Def. 3.2).

    Args:
        p: target probabilities [..., V].
        q: draft probabilities [..., V].

    Returns:
        The sum of |p - (p + q) / 2| over the vocabulary [...]; 0 where equal, 1 where disjoint.

    Raises:
        ValueError: if p or q is not a distribution, or their shapes differ.
    """
    p, q = _distributions(p, q)
    return np.abs(p - (p + q) / 2).sum(axis=-1)


def acceptance(p: ArrayLike, q: ArrayLike, lenience: float = 1.0) -> Float64:
    """beta, the probability that a guess drawn from q is accepted (Theorem 3.5; A.5).

    Its mean over prefixes is alpha (Corollary 3.6).

    Args:
        p: target probabilities [..., V].
        q: draft probabilities [..., V].
        lenience: l in (0, 1]; below 1 the outputs are no longer distributed as p.

    Returns:
        The sum of min(p / l, q) over the vocabulary [...].

    Raises:
        ValueError: if p or q is not a distribution, their shapes differ, or l is out of range.
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must lie in (0, 1], not {lenience}; 1 keeps decoding exact.")
    p, q = _distributions(p, q)
    return np.minimum(p / lenience, q).sum(axis=-1)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a target pass yields on average, for independent guesses (Eq. 1).

    Memory reads of the target's weights and cache shrink by the same factor.

    Args:
        alpha: acceptance rate in [0, 1].
        gamma: guesses of a step, 0 or more.

    Returns:
        (1 - alpha^(gamma + 1)) / (1 - alpha), between 1 and gamma + 1.

    Raises:
        ValueError: if alpha or gamma is out of range.
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    # Summing the series needs no special case at alpha = 1 and loses no digits beside it.
    return float(np.sum(np.float64(alpha) ** np.arange(gamma + 1)))


def oracle_tokens(alpha: float) -> float:
    """Tokens a target pass would yield if gamma always were the number acceptable (section 3.5).

    Args:
        alpha: acceptance rate in [0, 1].

    Returns:
        1 / (1 - alpha): Eq. 1 for unbounded gamma; infinite at alpha = 1.

    Raises:
        ValueError: if alpha is out of range.
    """
    _check_alpha(alpha)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float, verify_cost: float = 1.0) -> float:
    """Wall-time factor over plain decoding (Theorem 3.8), for any cost of verification.

    The theorem lets gamma + 1 positions cost what one does. Where a wide pass is not free,
    the measured v takes the place of that 1: Eq. 1 / (gamma c + v).

    Args:
        alpha: acceptance rate in [0, 1].
        gamma: guesses of a step, 0 or more.
        c: time of one draft step over that of one target step.
        verify_cost: v at this gamma; 1 is the theorem as printed.

    Returns:
        Time without over time with speculation, for the same tokens.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check_cost("c", c)
    if not 0 < verify_cost < math.inf:
        raise ValueError(f"verify_cost must be a positive time ratio, not {verify_cost}.")
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Factor by which arithmetic operations grow (Theorem 3.11).

    Args:
        alpha: acceptance rate in [0, 1].
        gamma: guesses of a step, 0 or more.
        c_hat: operations a token of the draft over those of the target.

    Returns:
        (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma + 1)).

    Raises:
        ValueError: if an argument is out of range.
    """
    _check_cost("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(
    alpha: float,
    c: float,
    verify_cost: Callable[[int], float] | None = None,
    max_gamma: int = 32,
) -> int:
    """The gamma of the largest `speedup` (section 3.5); the smallest such gamma on a tie.

    Args:
        alpha: acceptance rate in [0, 1].
        c: time of one draft step over that of one target step.
        verify_cost: v as a function of gamma, asked for 1 to `max_gamma`; None is v = 1.
        max_gamma: largest gamma considered.

    Returns:
        A gamma from 0, where no number of guesses beats plain decoding, to `max_gamma`.

    Raises:
        ValueError: if an argument, or a verification cost, is out of range.
    """
    _check_gamma(max_gamma)
    factors = [1.0]
    for gamma in range(1, max_gamma + 1):
        factors.append(speedup(alpha, gamma, c, verify_cost(gamma) if verify_cost else 1.0))
    return int(np.argmax(factors))


def expected_calls(alpha: float, gamma: int, length: int) -> float:
    """Target passes that `length` tokens take on average, for independent guesses.

    Eq. 1 is the yield of a pass that may run on; the last pass of a text yields no more than
    what is missing. This is the renewal equation over the tokens still to come, in which a pass
    yields k <= gamma tokens with probability alpha^(k - 1) (1 - alpha), and else gamma + 1.

    Args:
        alpha: acceptance rate in [0, 1].
        gamma: guesses of a step, 0 or more.
        length: tokens of the text, 0 or more.

    Returns:
        Between length / (gamma + 1) and length; for long texts length / `expected_tokens`
        and a constant.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    if length < 0 or length % 1 != 0:
        raise ValueError(f"length must be a whole number of tokens, 0 or more, not {length}.")
    chances = np.float64(alpha) ** np.arange(gamma + 1)
    chances[:gamma] *= 1 - alpha
    calls = np.zeros(length + 1)
    for missing in range(1, length + 1):
        yields = range(1, min(gamma + 1, missing) + 1)
        calls[missing] = 1 + sum(chances[k - 1] * calls[missing - k] for k in yields)
    return float(calls[length])


def predicted_speedup(
    alpha: float,
    gamma: int,
    c: float,
    verify_cost: float,
    lengths: Sequence[int],
    prefill: float = 0.0,
    prefill_draft: float = 0.0,
) -> float:
    """`speedup` for texts of given lengths whose sources must be encoded first.

    Args:
        alpha: acceptance rate in [0, 1].
        gamma: guesses of a step, 0 or more.
        c: time of one draft step over that of one target step.
        verify_cost: v at this gamma.
        lengths: tokens of each text.
        prefill: time in which the target encodes a source, over that of one target step.
        prefill_draft: likewise for the draft.

    Returns:
        The time all texts take without over the time with speculation; without prefill and
        for long texts, `speedup`.

    Raises:
        ValueError: if an argument is out of range.
    """
    step = expected_tokens(alpha, gamma) / speedup(alpha, gamma, c, verify_cost)
    _check_cost("prefill", prefill)
    _check_cost("prefill_draft", prefill_draft)
    if not lengths:
        raise ValueError("A speed-up can be predicted for at least one text.")
    without = sum(prefill + length for length in lengths)
    calls = sum(expected_calls(alpha, gamma, length) for length in lengths)
    return without / (len(lengths) * (prefill + prefill_draft) + calls * step)


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}; it is a rate of acceptance.")


def _check_gamma(gamma: int) -> None:
    if gamma < 0 or gamma % 1 != 0:
        raise ValueError(f"gamma must be a whole number of guesses, 0 or more, not {gamma}.")


def _check_cost(name: str, ratio: float) -> None:
    if not 0 <= ratio < math.inf:
        raise ValueError(f"{name} must be 0 or more, not {ratio}; it is a cost over the target's.")


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[Float64, Float64]:
    """Both as float64, after checking that they are distributions over one vocabulary."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if p.shape != q.shape:
        raise ValueError(f"p and q must have one shape [..., V], not {p.shape} and {q.shape}.")
    for name, values in (("p", p), ("q", q)):
        # The tolerance is float32's, over a vocabulary of tens of thousands.
        if not ((values >= 0).all() and np.allclose(values.sum(axis=-1), 1, rtol=0, atol=1e-4)):
            raise ValueError(
                f"{name} must be probabilities that sum to 1 over the last axis; "
                "standardise the logits first."
            )
    return p, q
