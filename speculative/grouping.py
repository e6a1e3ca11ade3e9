"""Texts of one width share batches, whose sizes are powers of two: few programs serve them all."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from speculative.ragged import power_of_two

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

NARROWEST = 32  # Tokens to which the shortest sources are padded.


def padded(tokens: int) -> int:
    """The width to which a source of `tokens` is padded; each width is a compiled program."""
    return max(NARROWEST, 2 ** (tokens - 1).bit_length())


def filled(rows: Iterable[Sequence[int] | np.ndarray], width: int, pad: int = 0) -> np.ndarray:
    """Rows of tokens as an int32 array [B, width], each padded at its end."""
    return np.array([[*row, *[pad] * (width - len(row))] for row in rows], np.int32)


def groups(
    items: Iterable[Item], key: Callable[[Item], Key], most: int | Callable[[Key], int]
) -> Iterator[tuple[list[Item], int]]:
    """Yields each key's items, in order of the keys' first items, with its batches' row count.

    There are at most `most` rows: a number for all keys, or a function of the key.
    """
    by_key: dict[Key, list[Item]] = {}
    for item in items:
        by_key.setdefault(key(item), []).append(item)
    for shared, group in by_key.items():
        yield group, min(most(shared) if callable(most) else most, power_of_two(len(group)))


def batches(
    items: Iterable[Item], key: Callable[[Item], Key], most: int | Callable[[Key], int]
) -> Iterator[tuple[list[Item], list[Item]]]:
    """Yields the batches of `groups`, each as it is and filled up to its number of rows.

    A key's last batch is filled up with its own first item, so that it needs no other program.
    """
    for group, rows in groups(items, key, most):
        for at in range(0, len(group), rows):
            chosen = group[at : at + rows]
            yield chosen, chosen + chosen[:1] * (rows - len(chosen))
