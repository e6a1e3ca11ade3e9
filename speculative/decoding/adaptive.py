"""How many guesses the next steps take, from how recent ones fared (section 3.5).

The choice depends on the past alone, and Algorithm 1 is exact for any number of guesses, so
outputs stay the target's own.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from speculative.types import Flags, Rows


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Picks gamma for the next few steps; hashable, a static argument of jitted functions.

    The pick has the most expected tokens a unit of time. Equation 1 expects them of one alpha for
    all guesses of a block; but after guesses that stood the next is likelier to stand with some
    drafts, less likely with others. So each of a block's positions has a rate of its own, of the
    guesses tested there, and gamma guesses yield 1 + r_1 + r_1 r_2 + ... + r_1 ... r_gamma tokens:
    Kaplan and Meier's estimate (1958), to which a short block tells nothing of later positions.

    Counts fade with every step. Where a position has few, its rate is near that of all together:
    r = (s alpha + accepted) / (s + tested), and alpha is found likewise, from all positions' counts
    and from where it begins. Texts are short beside what it takes to know these: `Output.counts` of
    one are where the next may begin.

    Attributes:
        gammas: to pick from, ascending; each is a compiled loop.
        costs: the time that a step with each takes, gamma c + v(gamma), in any unit. No part of
            what is compiled: rules that differ in these alone are equal, and share one program.
        alpha: where the rate of all positions begins.
        strength: s, the guesses that this counts for, and for each position the rate of all.
        memory: the share of the counts that a step leaves.
        stride: steps from pick to pick, for a pick takes time, and so does a change of gamma.

    Raises:
        ValueError: a value outside its range.
    """

    gammas: tuple[int, ...]
    costs: tuple[float, ...] = dataclasses.field(compare=False)
    alpha: float = 0.7
    strength: float = 12.0
    memory: float = 0.99
    stride: int = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "gammas", tuple(self.gammas))
        object.__setattr__(self, "costs", tuple(self.costs))
        if not self.gammas or min(self.gammas) < 1 or list(self.gammas) != sorted(set(self.gammas)):
            raise ValueError(
                f"Adaptive.gammas must be ascending numbers of at least 1 guess, not {self.gammas}."
            )
        if len(self.costs) != len(self.gammas) or not all(cost > 0 for cost in self.costs):
            raise ValueError(
                f"Adaptive.costs must be a positive number for each of {len(self.gammas)} gammas, "
                f"not {self.costs}."
            )
        if not 0 < self.alpha < 1 or not self.strength > 0 or not 0 <= self.memory <= 1:
            raise ValueError(
                "Adaptive.alpha must lie in (0, 1), strength be positive and memory lie in [0, 1], "
                f"not {self.alpha}, {self.strength} and {self.memory}."
            )
        if self.stride < 1:
            raise ValueError(f"Adaptive.stride must be at least 1 step, not {self.stride}.")

    def choose(self, counts: Array, costs: Array, live: Flags) -> Array:
        """The place of the best gamma in `gammas`, for all live [B] rows together.

        `counts` [B, max(gammas), 2] are faded numbers of guesses tested and accepted, by position
        in a block; `costs` [len(gammas)] are the rule's, or those given to a program it shares.
        """
        counts = jnp.where(live[:, None, None], counts, 0.0).sum(axis=0)
        (tested, accepted), (all_tested, all_accepted) = counts.T, counts.sum(axis=0)
        alpha = (self.strength * self.alpha + all_accepted) / (self.strength + all_tested)
        rates = (self.strength * alpha + accepted) / (self.strength + tested)
        tokens = 1 + jnp.cumsum(jnp.cumprod(rates))
        return jnp.argmax(tokens[jnp.array(self.gammas) - 1] / costs)

    def count(self, counts: Array, tested: Rows, accepted: Rows) -> Array:
        """The counts [B, max(gammas), 2] after a step that tested and accepted so many [B]."""
        positions = jnp.arange(counts.shape[1])[:, None]
        return self.memory * counts + (positions < jnp.stack([tested, accepted], axis=1)[:, None])
