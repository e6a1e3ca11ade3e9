"""The number of guesses of the next steps, from how recent guesses fared (section 3.5)."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from speculative import checks


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Picks gamma for the next few steps; hashable, a static argument of jitted functions.

    The pick depends on the past alone, so that decoding stays exact. It has the most expected
    tokens a unit of time. Equation 1 assumes one alpha for all guesses of a block; but with some
    drafts a guess is accepted more often after accepted ones, with others less often. So each
    position in a block has a rate of its own, of the guesses tested there, and gamma guesses yield
    1 + r_1 + r_1 r_2 + ... + r_1 ... r_gamma tokens: Kaplan and Meier's estimate (1958), which
    takes a block that ends early as no evidence about later positions.

    Counts fade with every step. The rate of a position with few counts is near the rate of all
    positions: r = (s alpha + accepted) / (s + tested); alpha is found likewise from the counts of
    all positions and the rule's own alpha. One text is too short to learn rates from, so that
    `Output.counts` of a text may start the next one.

    Attributes:
        gammas: to pick from, ascending; each is a compiled loop.
        costs: the time of a step with each, gamma c + v(gamma), in any unit. Rules that differ in
            costs alone are equal, and share one compiled program.
        alpha: the initial rate of all positions.
        strength: s, the number of guesses that priors count as.
        memory: the factor by which each step multiplies the counts.
        stride: steps from pick to pick, for a pick takes time, and so does a change of gamma.
    """

    gammas: tuple[int, ...]
    costs: tuple[float, ...] = dataclasses.field(compare=False)
    alpha: float = 0.7
    strength: float = 12.0
    memory: float = 0.99
    stride: int = 6

    def __post_init__(self) -> None:
        for name in ("gammas", "costs"):
            checks.instance(f"Adaptive.{name}", getattr(self, name), tuple, list)
        gammas = [checks.whole("Adaptive.gammas", x, 1, checks.MAX_GAMMA) for x in self.gammas]
        if not gammas or gammas != sorted(set(gammas)):
            raise ValueError(f"Adaptive.gammas must be ascending numbers, not {self.gammas}.")
        costs = [
            checks.real("Adaptive.costs", x, "be positive", lambda x: x > 0) for x in self.costs
        ]
        if len(costs) != len(gammas):
            raise ValueError(
                f"Adaptive.costs must be a number for each of {len(gammas)} gammas, not {costs}."
            )
        for name, value in (
            ("gammas", tuple(gammas)),
            ("costs", tuple(costs)),
            ("alpha", self._real("alpha", "lie in (0, 1)", lambda x: 0 < x < 1)),
            ("strength", self._real("strength", "be positive", lambda x: 0 < x < math.inf)),
            ("memory", self._real("memory", "lie in [0, 1]", lambda x: 0 <= x <= 1)),
            ("stride", checks.whole("Adaptive.stride", self.stride, 1)),
        ):
            object.__setattr__(self, name, value)

    def _real(self, name: str, must: str, fits: Callable[[float], bool]) -> float:
        return checks.real(f"Adaptive.{name}", getattr(self, name), must, fits)

    def choose(self, counts: Array, costs: Array) -> Array:
        """The best gamma of each row [B], from its own counts alone.

        `counts` [B, max(gammas), 2] are faded numbers of guesses tested and accepted, by position
        in a block; `costs` [len(gammas)] are those of the rule.
        """
        tested, accepted = counts[..., 0], counts[..., 1]
        all_tested, all_accepted = (x.sum(axis=1, keepdims=True) for x in (tested, accepted))
        alpha = (self.strength * self.alpha + all_accepted) / (self.strength + all_tested)
        rates = (self.strength * alpha + accepted) / (self.strength + tested)
        tokens = 1 + jnp.cumsum(jnp.cumprod(rates, axis=1), axis=1)
        gammas = jnp.array(self.gammas)
        return gammas[jnp.argmax(tokens[:, gammas - 1] / costs, axis=1)]

    def count(self, counts: Array, of_step: Array) -> Array:
        """The counts [B, max(gammas), 2] after a step, of the same shape."""
        return self.memory * counts + of_step
