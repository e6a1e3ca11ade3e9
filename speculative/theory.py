"""The paper's equations in closed form, float64, and our additions.

Symbols: `alpha` is the expected acceptance rate in [0, 1]; `gamma` the guesses per step, 0 or more
(0 is autoregressive decoding); `c` the time of one draft step over that of one target step;
`verify_cost`, v, the time of a target pass over gamma + 1 positions over that of one position.
Ratios have no unit. Every function raises ValueError for an argument out of range. Equation,
theorem and section numbers are those of arXiv 2211.17192v2.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a target pass yields on average, for i.i.d. acceptances (Eq. 1).

    (1 - alpha^(gamma + 1)) / (1 - alpha), between 1 and gamma + 1. Memory reads of the target's
    weights and cache shrink by the same factor.
    """
    _check_alpha(alpha)
    _check_whole("gamma", gamma, "guesses")
    # Summing the series needs no special case at alpha = 1 and loses no digits near it.
    return float(np.sum(np.float64(alpha) ** np.arange(gamma + 1)))


def tree_tokens(accepted: Sequence[float]) -> float:
    """Tokens that a pass over a tree of guesses yields on average.

    `accepted` holds, by depth, the probability that a guess is accepted if the ones before it were.
    The result is 1 plus the sum over depths of the products of these.
    """
    for share in accepted:
        _check_alpha(share)
    return float(1 + np.cumprod(np.asarray(accepted, np.float64)).sum())


# How often the target's choice is the draft's second, third, fourth one if it is none of the
# likelier ones: measured on the bundled pair, English to German, 1,160 and 7,080 tokens.
LEFT = {"greedy": (0.515, 0.33, 0.24), "coupled": (0.43, 0.31, 0.22)}
# The share of positions, with shared noise, where the draft's first choice is the target's, over
# the sum of min(p, q).
FIRST = 0.954


def shares_by_rank(alpha: float, greedy: bool) -> tuple[float, ...]:
    """How often the target's choice is a draft's first, second, third and fourth one.

    At temperature 0 the first one's share is alpha. Above it, with noise that both share
    (`rules.Coupled`), it is less, because alpha is the greatest share of any coupling.
    """
    _check_alpha(alpha)
    shares = [alpha if greedy else FIRST * alpha]
    for share in LEFT["greedy" if greedy else "coupled"]:
        shares.append((1 - sum(shares)) * share)
    return tuple(shares)


def best_tree(shares: Sequence[float], nodes: int, depth: int, width: int) -> tuple[float, ...]:
    """The probabilities that a guess at each depth of the best tree of `nodes` is accepted.

    A node's probability is the product of the shares of the ranks on its path; the best tree has
    the nodes with the greatest products, and only the `width` likeliest of a level have successors.
    Each depth is conditioned on the one before; see `tree_tokens`.
    """
    levels, likely = [], np.ones(1)
    for _ in range(depth):
        likely = np.sort(np.outer(likely[:width], shares).ravel())[::-1]
        levels.append(likely)
    least = np.sort(np.concatenate(levels))[::-1][:nodes][-1]
    spare = nodes - sum(int((level > least).sum()) for level in levels)
    reached = [1.0]
    for level in levels:  # Equally likely nodes fill the remaining places.
        equal = min(spare, int((level == least).sum()))
        spare -= equal
        reached.append(float(level[level > least].sum() + equal * least))
    return tuple(b / a if a else 0.0 for a, b in itertools.pairwise(reached))


def acceptance_rate(tokens: float, gamma: int) -> float:
    """The alpha at which Eq. 1 gives `tokens`, from 1 to gamma + 1: its inverse, by bisection.

    At gamma = 0, where any alpha fits, it is 0.
    """
    _check_whole("gamma", gamma, "guesses")
    if not 1 <= tokens <= gamma + 1:
        raise ValueError(
            f"A pass with {gamma} guesses yields 1 to {gamma + 1} tokens, not {tokens}."
        )
    low, high = 0.0, 1.0
    for _ in range(60 if gamma else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return low if tokens < gamma + 1 or not gamma else 1.0


def oracle_tokens(alpha: float) -> float:
    """Tokens a target pass would yield if gamma always were the number of guesses it accepts.

    1 / (1 - alpha), an oracle for gamma (section 3.5): Eq. 1 for unbounded gamma; infinite at
    alpha = 1.
    """
    _check_alpha(alpha)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float, verify_cost: float = 1.0) -> float:
    """Wall-time factor over autoregressive decoding (Theorem 3.8), for any cost of verification.

    The theorem assumes that gamma + 1 positions cost as much as one. If a wide pass is not free,
    the measured v replaces that 1: Eq. 1 / (gamma c + v).
    """
    _check_cost("c", c)
    if not 0 < verify_cost < math.inf:
        raise ValueError(f"verify_cost must be a positive time ratio, not {verify_cost}.")
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Factor by which arithmetic operations grow (Theorem 3.11).

    (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma + 1)), where c_hat is the draft's
    operations per token over the target's.
    """
    _check_cost("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def expected_calls(alpha: float, gamma: int, length: int) -> float:
    """Target passes that `length` tokens take on average, for i.i.d. acceptances.

    Eq. 1 ignores that a text's last pass yields no more tokens than are missing. This is the
    renewal equation over the tokens still to come: a pass yields k <= gamma tokens with probability
    alpha^(k - 1) (1 - alpha), and otherwise gamma + 1.
    """
    _check_alpha(alpha)
    _check_whole("gamma", gamma, "guesses")
    _check_whole("length", length, "tokens")
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
    """`speedup` for texts of given lengths, in tokens, whose sources must be encoded first.

    `prefill` and `prefill_draft` are the times in which target and draft encode a source, over that
    of one target step.
    """
    step = expected_tokens(alpha, gamma) / speedup(alpha, gamma, c, verify_cost)
    _check_cost("prefill", prefill)
    _check_cost("prefill_draft", prefill_draft)
    if not lengths:
        raise ValueError("A speed-up can be predicted only for at least one text; there is none.")
    without = sum(prefill + length for length in lengths)
    calls = sum(expected_calls(alpha, gamma, length) for length in lengths)
    return without / (len(lengths) * (prefill + prefill_draft) + calls * step)


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}; it is a rate of acceptance.")


def _check_whole(name: str, number: int, things: str) -> None:
    if number < 0 or number % 1 != 0:
        raise ValueError(f"{name} must be a whole number of {things}, 0 or more, not {number}.")


def _check_cost(name: str, ratio: float) -> None:
    if not 0 <= ratio < math.inf:
        raise ValueError(f"{name} must be 0 or more, not {ratio}; it is a cost over the target's.")
