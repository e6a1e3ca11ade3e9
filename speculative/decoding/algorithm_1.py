"""Algorithm 1 in float64 NumPy, on one row (Leviathan et al., sections 2.2 and 2.3).

Tests compare the device's arithmetic with it; the two share no code.
"""

import numpy as np

from speculative.sampling import Sampling


def one_hot(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Distributions [..., V] with all probability on tokens [...]."""
    return (np.arange(vocab_size) == tokens[..., None]).astype(np.float64)


def standardise(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """`sampling.standardise` in float64, [..., V] -> [..., V]."""
    logits = np.asarray(logits, np.float64)
    if sampling.greedy:
        return one_hot(logits.argmax(axis=-1), logits.shape[-1])
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = np.sort(logits, axis=-1)[..., -sampling.top_k, None]
        logits = np.where(logits >= smallest, logits, -np.inf)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    if sampling.top_p < 1:
        descending = -np.sort(-p, axis=-1)
        needed = np.cumsum(descending, axis=-1) - descending < sampling.top_p
        smallest = np.where(needed, descending, np.inf).min(axis=-1, keepdims=True)
        p = np.where(p >= smallest, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    if sampling.min_p > 0:
        p = np.where(p >= sampling.min_p * p.max(axis=-1, keepdims=True), p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    return p


def draw(weights: np.ndarray, uniform: float) -> int:
    """The first token whose running sum exceeds `uniform` of the total: [V] -> token."""
    running = np.cumsum(np.asarray(weights, np.float64))
    found = np.searchsorted(running, uniform * running[-1], side="right")
    return int(min(found, np.argmax(running >= running[-1])))


def verify(
    guesses: list[int],
    p: np.ndarray,
    q: np.ndarray,
    r: np.ndarray,
    correct: np.ndarray,
    lenience: float = 1.0,
) -> tuple[int, int]:
    """Lines 3 to 5 of Algorithm 1: how many guesses are accepted, and the token after them.

    p [gamma + 1, V] and q [gamma, V] are standardised. The numbers r [gamma] in [0, 1) test the
    guesses; that of `correct` [gamma + 1] at the next token's position draws it. With lenience l,
    l q takes the place of q (A.5).
    """
    q = lenience * q
    n = 0
    while n < len(guesses) and r[n] * q[n, guesses[n]] < p[n, guesses[n]]:
        n += 1
    residual = np.maximum(p[n] - q[n], 0.0) if n < len(guesses) else p[n]
    return n, draw(residual if residual.sum() > 0 else p[n], correct[n])
