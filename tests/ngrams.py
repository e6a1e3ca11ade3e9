"""Witten-Bell back-off by dictionaries in float64, and texts to count; no code of the package."""

from collections import Counter
from collections.abc import Sequence

import numpy as np


def texts(vocab_size: int, number: int = 40, seed: int = 5) -> list[np.ndarray]:
    """Random texts that end with a 1: a few of their tokens are common, most are rare."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, vocab_size + 1) ** 1.5
    chances /= chances.sum()
    return [
        np.array([*rng.choice(vocab_size, rng.integers(0, 12), p=chances), 1])
        for _ in range(number)
    ]


def row(
    sequences: Sequence[np.ndarray],
    context: Sequence[int],
    vocab_size: int,
    width: int = 10**9,
    min_count: int = 1,
) -> np.ndarray:
    """The distribution [V] of what follows a context, oldest token first.

    A token that is none ends the context.
    """
    q = np.zeros(vocab_size)
    if not context:
        for sequence in sequences:
            np.add.at(q, sequence, 1.0)
        return (q + 1) / (q.sum() + vocab_size)
    shorter = row(sequences, context[1:], vocab_size, width, min_count)
    followed: Counter[int] = Counter()
    for sequence in sequences:
        text = [0, *sequence.tolist()]
        for i in range(len(context), len(text)):
            if text[i - len(context) : i] == list(context):
                followed[text[i]] += 1
    by_count = sorted(followed.items(), key=lambda item: (-item[1], item[0]))
    for token, count in by_count[:width]:
        if count >= min_count:
            q[token] = count / (followed.total() + len(followed))
    return q + (1 - q.sum()) * shorter
