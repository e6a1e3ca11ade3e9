"""Verification rules beyond Algorithm 1, and the registry of all rules by name."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative import checks, noise, theory
from speculative.decoding import block, reference
from speculative.decoding.reference import ACCEPT, CORRECT
from speculative.decoding.rule import (
    EXACT,
    Rule,
    Token,
    following,
    leading,
    residual,
    with_bonus,
)
from speculative.sampling import Sampling, argmax, categorical, choose, standardise


@dataclasses.dataclass(frozen=True)
class Block(Rule):
    """Verifies a step's guesses together, which accepts no fewer of them on average; exact.

    Whether i guesses are accepted depends on guesses and numbers after them, so each step has its
    own random numbers. For greedy decoding and deterministic proposals, where nothing is gained, it
    is token verification. See `decoding.block`.
    """

    by_guess: ClassVar[bool] = False
    keyed_by: ClassVar[Literal["position", "step"]] = "step"

    @property
    def exact(self) -> bool:
        """Always true."""
        return True

    def verify(self, guesses, logits, q, sampling, uniforms) -> tuple[Array, Array]:
        """See `Rule.verify`."""
        if sampling.greedy or q is None:
            return EXACT.verify(guesses, logits, q, sampling, uniforms)
        p, q = standardise(logits, sampling), with_bonus(q)
        kept, passes = block.kept(guesses, p, q)
        accepted = block.largest(uniforms[:, :-1, ACCEPT] < passes[:, 1:])
        values = kept[..., None], p, q, uniforms[..., CORRECT]
        own, p_next, q_next, uniform = (following(x, accepted) for x in values)
        return accepted, categorical(residual(own * p_next, q_next), uniform)

    def verify_reference(self, guesses, logits, q, sampling, uniforms) -> tuple[int, int]:
        """See `Rule.verify_reference`."""
        if sampling.greedy or q is None:
            return EXACT.verify_reference(guesses, logits, q, sampling, uniforms)
        p = reference.standardise(logits, sampling)
        r, correct = uniforms[:-1, ACCEPT], uniforms[:, CORRECT]
        return block.verify_reference(guesses, p, q, r, correct)

    def chances(self, guesses, logits, q, sampling) -> Array:
        """See `Rule.chances`."""
        if sampling.greedy or q is None:
            return EXACT.chances(guesses, logits, q, sampling)
        p, q = standardise(logits, sampling), with_bonus(q)
        passes = block.kept(guesses, p, q)[1].at[:, 0].set(1.0)
        # The largest number that passes is accepted: it passes, and no larger one does.
        larger = jnp.cumprod(1 - passes[:, :0:-1], axis=1)[:, ::-1]
        return passes * jnp.pad(larger, ((0, 0), (0, 1)), constant_values=1.0)

    def acceptance(self, logits, q, sampling) -> Array:
        """Sum of min(p, q) over V: for a single guess, this rule is token verification."""
        return EXACT.acceptance(logits, q, sampling)


@dataclasses.dataclass(frozen=True)
class Coupled(Rule):
    """Decodes perturbed logits greedily, so no draft can change a text; exact.

    The target's token at a position is the x with the greatest log p(x) + g(x), where g is Gumbel
    noise that belongs to the position and the token (`noise`). The draft guesses the x with the
    greatest log q(x) + g(x), with the same g, which is often the same token (Daliri et al., arXiv
    2408.07978). A guess is accepted if it is the target's token, so the rule verifies trees at any
    temperature.
    """

    keyed_by: ClassVar[Literal["position", "step", "token"]] = "token"

    @property
    def exact(self) -> bool:
        """Always true."""
        return True

    @property
    def alone(self) -> "Rule":
        """This rule itself: the noise belongs to the text."""
        return self

    def to_guess(self, numbers: Array | np.ndarray) -> Array | np.ndarray:
        """The noise [B, G, V]."""
        return numbers[:, :-1]

    def verifies_trees(self, sampling: Sampling) -> bool:
        """Always true."""
        return True

    def choices(self, logits, sampling, numbers) -> Array:
        """See `Rule.choices`."""
        return choose(logits, sampling, numbers)

    def choices_reference(self, logits, sampling, numbers) -> np.ndarray:
        """See `Rule.choices_reference`."""
        return reference.perturbed(logits, sampling, numbers).argmax(axis=-1)

    def verify(self, guesses, logits, q, sampling, uniforms) -> tuple[Array, Array]:
        """See `Rule.verify`; numbers are noise [B, G + 1, V]."""
        chosen = self.choices(logits, sampling, uniforms)
        accepted = leading(guesses == chosen[:, :-1])
        return accepted, following(chosen, accepted)

    def verify_reference(self, guesses, logits, q, sampling, uniforms) -> tuple[int, int]:
        """See `Rule.verify_reference`."""
        chosen = self.choices_reference(logits, sampling, uniforms)
        accepted = [*(np.array(guesses) == chosen[:-1]), False].index(False)
        return accepted, int(chosen[accepted])

    def acceptance(self, logits, q, sampling) -> Array:
        """The share of `NOISES` noise samples with which p and q choose the same token.

        The probability itself, the sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)),
        takes V^2 quotients. It is at least the sum of min(p, q) over that of max(p, q).
        """
        if sampling.greedy:
            return EXACT.acceptance(logits, q, sampling)
        rows, size = logits.shape[:-1], logits.shape[-1]
        p = standardise(logits, sampling)
        log_p, log_q = jnp.log(p), jnp.log(q)

        def same(example: Array) -> Array:
            keys = noise.keys_of(0, example[None])
            many = math.prod(rows)
            of_rows = noise.gumbel(keys, jnp.zeros(1, jnp.int32), many, size).reshape(p.shape)
            return argmax(log_p + of_rows) == argmax(log_q + of_rows)

        return lax.map(same, jnp.arange(NOISES)).mean(axis=0)


NOISES = 8  # Noise samples over which `Coupled.acceptance` averages.


@dataclasses.dataclass(frozen=True)
class Simulated(Rule):
    """Accepts each guess with probability alpha, whatever the logits: only for timing.

    For a tree, or if the other rule is coupled, the probabilities are those of
    `theory.shares_by_rank`. The other rule's arithmetic still runs; outputs are not the target's.
    """

    alpha: float
    other: Rule = Token()

    def __post_init__(self) -> None:
        must, fits = "lie in [0, 1]", lambda x: 0 <= x <= 1
        object.__setattr__(self, "alpha", checks.real("simulated_alpha", self.alpha, must, fits))

    @property
    def keyed_by(self) -> Literal["position", "step", "token"]:  # pyright: ignore
        """The other rule's `keyed_by`."""
        return self.other.keyed_by

    @property
    def data(self) -> tuple[str, ...]:
        """The other rule, whose own data are arguments of programs."""
        return ("other",)

    @property
    def exact(self) -> bool:
        """Always false."""
        return False

    @property
    def alone(self) -> Rule:
        """The other rule's `alone`."""
        return self.other.alone

    def to_guess(self, numbers: Array | np.ndarray) -> Array | np.ndarray:
        """Delegates to the other rule."""
        return self.other.to_guess(numbers)

    def verifies_trees(self, sampling: Sampling) -> bool:
        """Delegates to the other rule."""
        return self.other.verifies_trees(sampling)

    def choices(self, logits, sampling, numbers) -> Array:
        """Delegates to the other rule."""
        return self.other.choices(logits, sampling, numbers)

    def _shares(self, sampling: Sampling) -> tuple[float, ...]:
        return theory.shares_by_rank(self.alpha, sampling.greedy)

    def _uniform(self, numbers: Array | np.ndarray) -> Array | np.ndarray:
        """A number in [0, 1) per position [...], from its [..., numbers] or noise [..., V]."""
        if self.keyed_by == "token":
            return jnp.exp(-jnp.exp(-jnp.asarray(numbers[..., 0])))
        return numbers[..., ACCEPT]

    def accepts(self, sampling: Sampling) -> float:
        """The probability that a guess in a chain is accepted."""
        coupled = self.keyed_by == "token"
        return self._shares(sampling)[0] if coupled else self.alpha

    def verify(self, guesses, logits, q, sampling, uniforms) -> tuple[Array, Array]:
        """The other rule's next token, after a random number of accepted guesses."""
        _, next_token = self.other.verify(guesses, logits, q, sampling, uniforms)
        uniform = jnp.asarray(self._uniform(uniforms[:, :-1]))
        return leading(uniform < self.accepts(sampling)), next_token

    def verify_tree(self, guesses, logits, sampling, numbers, tree) -> tuple[Array, Array, Array]:
        """The other rule's next token, after a path of random ranks."""
        chosen = self.choices(logits, sampling, tree.by_place(numbers))
        uniform = jnp.asarray(self._uniform(numbers))  # [B, D + 1]
        limits = jnp.asarray(np.cumsum(self._shares(sampling), dtype=np.float32))
        rank = (uniform[..., None] >= limits).sum(axis=-1)
        of_parent = jnp.take_along_axis(rank, jnp.maximum(tree.depths[:, 1:] - 1, 0), axis=1)
        return tree.longest(tree.ranks == of_parent, chosen)

    def verify_reference(self, guesses, logits, q, sampling, uniforms) -> tuple[int, int]:
        """See `verify`."""
        _, next_token = self.other.verify_reference(guesses, logits, q, sampling, uniforms)
        passed = [*(np.asarray(self._uniform(uniforms[:-1])) < self.accepts(sampling)), False]
        return passed.index(False), next_token

    def acceptance(self, logits, q, sampling) -> Array:
        """The same probability everywhere."""
        return jnp.full(logits.shape[:-1], self.accepts(sampling))


# The rules by name (`RowConfig.verification`), made without arguments; add a new rule here.
RULES: dict[str, type[Rule]] = {"token": Token, "block": Block, "coupled": Coupled}


def select(
    verification: str = "token", lenience: float = 1.0, simulated_alpha: float | None = None
) -> Rule:
    """The rule of this name; only `Token` takes a lenience, and an alpha wraps it in `Simulated`.

    Raises:
        ValueError: the name is unknown, a value is out of range, or another rule gets a lenience.
    """
    if not isinstance(verification, str) or verification not in RULES:
        known = ", ".join(RULES)
        raise ValueError(f"There is no verification {verification!r}; known are {known}.")
    rule = RULES[verification]()
    if isinstance(rule, Token):
        rule = dataclasses.replace(rule, lenience=lenience)
    elif lenience != 1:
        raise checks.SettingError(
            f"lenience = {lenience} is for token verification, not for {verification}; set it "
            "to 1, or verification to token."
        )
    return rule if simulated_alpha is None else Simulated(simulated_alpha, rule)
