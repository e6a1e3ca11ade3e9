"""The guesses of a step as a tree: a guess may have several successors (SpecInfer, 2305.09781)."""

import dataclasses
import functools

import jax.numpy as jnp
from flax import struct
from jax import Array

from speculative import checks
from speculative.types import Flags, Rows


@dataclasses.dataclass(frozen=True)
class Growth:
    """How trees of guesses grow: a draft reads a level of nodes in one pass; this shapes programs.

    The `BRANCHES` likeliest successors of every node that is read are candidates, and the `WIDTH`
    likeliest candidates of a level are read next. The likeliest of all candidates form the tree. A
    candidate's likelihood is the product along its path of the draft's own probabilities (EAGLE-2,
    Li et al., arXiv 2406.16858) or, with `shares`, of how often the target's choice was the draft's
    first, second, ... one. No node is likelier than its parent, so the chosen nodes form a tree. No
    tree in which `WIDTH` nodes of a level have successors has a greater sum; without that limit it
    would be the tree that Sequoia's dynamic programming finds (Chen et al., arXiv 2402.12374).

    Attributes:
        nodes: guesses in a tree.
        depth: the most guesses that may be accepted in a step, gamma.
        shares: the shares by rank, in (0, 1]; further ranks are not guessed.
    """

    WIDTH = 8  # Rows of a TPU's tile: a pass over so many nodes takes no longer than over one.
    BRANCHES = 8

    nodes: int
    depth: int
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.depth == 0:
            raise checks.SettingError(
                f"tree = {self.nodes} guesses need gamma of at least 1, their depth; set tree to 0 "
                "to decode without guesses."
            )
        checks.whole("gamma", self.depth, 1, checks.MAX_GAMMA)
        most = self.most(self.depth)
        if not self.depth <= checks.whole("tree", self.nodes, 1) <= most:
            raise checks.SettingError(
                f"tree = {self.nodes} guesses do not fit gamma = {self.depth}, the depth of the "
                f"tree: give from {self.depth} to {most}, or 0 for a chain."
            )
        if self.shares is not None:
            checks.whole("The number of shares", len(self.shares), 1, self.BRANCHES)
            for share in self.shares:
                checks.real("A share", share, "lie in (0, 1]", lambda x: 0 < x <= 1)

    @classmethod
    def most(cls, depth: int) -> int:
        """The most guesses of a tree of this depth."""
        return min(checks.MAX_NODES, cls.BRANCHES * (1 + (depth - 1) * cls.WIDTH))

    @property
    def read(self) -> int:
        """Nodes that a draft reads: those of all levels but the last."""
        return (self.depth - 1) * self.WIDTH


@struct.dataclass
class Tree:
    """Which guess follows which, in each row.

    A place is a token's index in the chunk that the target reads: 0 is the newest token of the
    text, i the i-th guess. Everything is computed by comparisons and sums of [G + 1, G + 1],
    because on a TPU a gather or a scatter is a loop.
    """

    parents: Array  # [B, G] int32, the place of the token before each guess, which is less.
    ranks: Array  # [B, G] int32, each guess's rank by likelihood among its siblings, from 0.
    depth: int = struct.field(pytree_node=False)  # D, the most guesses on a path.

    @functools.cached_property
    def follows(self) -> Flags:
        """Whether place i's parent is place j: [B, G + 1, G + 1]; the first has none."""
        places = jnp.arange(self.parents.shape[1] + 1)
        return jnp.pad(self.parents[..., None] == places, ((0, 0), (1, 0), (0, 0)))

    @functools.cached_property
    def mask(self) -> Flags:
        """Whether place i sees place j, which is then on its path: [B, G + 1, G + 1]."""
        seen = self.follows | jnp.eye(self.follows.shape[1], dtype=bool)
        reach = 1
        while reach < self.depth:  # Adds the places that seen places see.
            counts = seen.astype(jnp.float32)
            seen, reach = jnp.einsum("bij,bjk->bik", counts, counts) > 0.5, 2 * reach
        return seen

    @functools.cached_property
    def depths(self) -> Array:
        """The guesses on the path of each place, [B, G + 1] int32."""
        return self.mask.sum(axis=-1, dtype=jnp.int32) - 1

    @functools.cached_property
    def on_paths(self) -> Array:
        """The places on the path of each place, [B, G + 1, D + 1] int32; beyond its end 0."""
        at_depth = self.depths[:, None] == jnp.arange(self.depth + 1)[:, None]  # [B, D + 1, G + 1]
        at = self.mask[:, :, None] & at_depth[:, None]
        return jnp.where(at, jnp.arange(at.shape[-1]), 0).sum(axis=-1, dtype=jnp.int32)

    def by_place(self, numbers: Array) -> Array:
        """Numbers [B, D + 1, ...] of positions, for the places at them: [B, G + 1, ...]."""
        at = self.depths.reshape(*self.depths.shape, *[1] * (numbers.ndim - 2))
        return jnp.take_along_axis(numbers, at, axis=1)

    def tested(self, path: Array, accepted: Rows) -> Rows:
        """The number of depths [B] with tested guesses: the accepted ones, and the next if any."""
        end = jnp.take_along_axis(path, accepted[:, None], axis=1)
        more = jnp.take_along_axis(self.follows.any(axis=1), end, axis=1)[:, 0]
        return accepted + more

    def right(self, guesses: Array, choices: Array) -> Flags:
        """Whether each guess [B, G] is the choice [B, G + 1] that was made at its parent."""
        chosen = jnp.where(self.follows, choices[:, None], 0).sum(axis=-1)
        return guesses == chosen[:, 1:]

    def longest(self, right: Flags, choices: Array) -> tuple[Array, Rows, Rows]:
        """The longest path of guesses that are all `right` [B, G].

        Returns:
            path [B, D + 1], its places from 0 on, followed by zeros; the number of guesses on it
            [B]; and the choice [B], out of those at each place [B, G + 1], made at its end.
        """
        right = jnp.pad(right, ((0, 0), (1, 0)), constant_values=True)
        stands = ~(self.mask & ~right[:, None]).any(axis=-1)
        reached = jnp.where(stands, self.depths, 0)
        accepted = reached.max(axis=1)
        # The first of siblings with the same token is taken.
        ends = stands & (reached == accepted[:, None])
        end = ends & (jnp.cumsum(ends, axis=1) == 1)
        path = jnp.where(end[..., None], self.on_paths, 0).sum(axis=1)
        return path, accepted, jnp.where(end, choices, 0).sum(axis=1)
