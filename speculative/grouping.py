"""Texts of one width share batches, whose sizes are powers of two: few programs serve them all."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from speculative.ragged import power_of_two

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

NARROWEST = 32  # Tokens to which the shortest sources are padded.


def padded(tokens: int) -> int:
    """The width to which a source of so many tokens is padded: each is a compiled program."""
    return max(NARROWEST, 2 ** (tokens - 1).bit_length())


def filled(rows: Iterable[Sequence[int] | np.ndarray], width: int, pad: int = 0) -> np.ndarray:
    """Tokens [B, width] of rows, int32, each filled up at its end."""
    return np.array([[*row, *[pad] * (width - len(row))] for row in rows], np.int32)


def groups(
    items: Iterable[Item], key: Callable[[Item], Key], most: int | Callable[[Key], int]
) -> Iterator[tuple[list[Item], int]]:
    """The items of each key, in the order of its first one, and the rows of batches of them.

    There are at most so many rows, a number for all keys or a function of one.
    """
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    for shared, group in found.items():
        yield group, min(most(shared) if callable(most) else most, power_of_two(len(group)))


def batches(
    items: Iterable[Item], key: Callable[[Item], Key], most: int | Callable[[Key], int]
) -> Iterator[tuple[list[Item], list[Item]]]:
    """The batches of `groups`, and each filled up to its rows.

    The last one of a key is filled up with its first item, so that it needs no other program.
    """
    for group, rows in groups(items, key, most):
        for at in range(0, len(group), rows):
            chosen = group[at : at + rows]
            yield chosen, chosen + chosen[:1] * (rows - len(chosen))
