"""The guesses of a step as a tree: a guess may have several successors (SpecInfer, 2305.09781)."""

import dataclasses
import functools

import jax
import numpy as np

from speculative import checks


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tree:
    """Which guess follows which, in all rows alike; it shapes programs.

    A place is where a token stands in the chunk that the target reads: 0 is the newest token of the
    text, i the i-th guess. D is the depth of the tree, the most guesses that may be accepted.
    """

    parents: tuple[int, ...]  # Of each guess, the place of the token before it, which is less.

    def __post_init__(self) -> None:
        for place, parent in enumerate(self.parents, 1):
            checks.whole(f"The parent of guess {place}", parent, 0, place - 1)

    @functools.cached_property
    def paths(self) -> list[list[int]]:
        """Of each place, the places of the guesses from the newest token to it, its own at last."""
        found: list[list[int]] = [[]]
        for place, parent in enumerate(self.parents, 1):
            found.append([*found[parent], place])
        return found

    @property
    def depths(self) -> np.ndarray:
        """The guesses on the path of each place, [G + 1] int32."""
        return np.array([len(path) for path in self.paths], np.int32)

    @property
    def depth(self) -> int:
        """D."""
        return int(self.depths.max())

    @property
    def on_paths(self) -> np.ndarray:
        """The paths as rows [G + 1, D] of places; beyond a path's end any."""
        return np.array([path + [1] * (self.depth - len(path)) for path in self.paths])

    @property
    def mask(self) -> np.ndarray:
        """Whether each place sees each other, which then is on its path: [G + 1, G + 1]."""
        places = np.arange(len(self.paths))
        return np.array([np.isin(places, [0, *path]) for path in self.paths])
