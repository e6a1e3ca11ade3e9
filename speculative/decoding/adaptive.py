"""How many guesses the next step takes, from how recent ones fared (section 3.5).

The choice depends on the past alone, and Algorithm 1 is exact for any number of guesses, so
outputs stay the target's own.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative import theory
from speculative.types import Flags, Rows


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Picks gamma for each step; hashable, a static argument of jitted functions.

    Alpha is estimated as (a s + accepted) / (s + tested), the counts fading with every step: the
    mean of a Beta(a s, (1 - a) s) prior's posterior. The gamma is the one of the largest expected
    number of tokens (Eq. 1) a unit of time. Texts are short beside what it takes to know alpha:
    `Output.counts` of one are where the next may begin.

    Attributes:
        gammas: to pick from, ascending; each is a compiled loop.
        costs: the time that a step with each takes, gamma c + v(gamma), in any unit.
        alpha: a, where the estimate begins.
        strength: s, the guesses that a counts for.
        memory: the share of the counts that a step leaves.

    Raises:
        ValueError: a value outside its range.
    """

    gammas: tuple[int, ...]
    costs: tuple[float, ...]
    alpha: float = 0.7
    strength: float = 32.0
    memory: float = 0.99

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

    def choose(self, counts: Array, live: Flags) -> Array:
        """The place of the best gamma in `gammas`, for all live [B] rows together.

        `counts` [B, 2] are faded numbers of guesses tested and accepted.
        """
        tested, accepted = jnp.where(live[:, None], counts, 0.0).sum(axis=0)
        alpha = (self.alpha * self.strength + accepted) / (self.strength + tested)
        return (alpha >= jnp.asarray(self.bounds, jnp.float32)).sum().astype(jnp.int32)

    @functools.cached_property
    def bounds(self) -> tuple[float, ...]:
        """For each gamma but the first, from which alpha on it or a larger one is best.

        One bound for each is enough: the larger of two gammas gains the more by Eq. 1 the larger
        alpha is. The loop on the device is left with a comparison.
        """
        alphas = np.linspace(0, 1, 1001)
        rates = [
            [theory.expected_tokens(alpha, gamma) / cost for alpha in alphas]
            for gamma, cost in zip(self.gammas, self.costs, strict=True)
        ]
        best = np.argmax(rates, axis=0)
        return tuple(
            float(alphas[best >= place][0]) if (best >= place).any() else 2.0
            for place in range(1, len(self.gammas))
        )

    def count(self, counts: Array, tested: Rows, accepted: Rows) -> Array:
        """The counts [B, 2] after a step that tested and accepted so many guesses [B]."""
        return self.memory * counts + jnp.stack([tested, accepted], axis=1)
