"""Verification: which guesses of a step are accepted, and which token follows them.

`Rule` is the interface and `Token` the rule of Algorithm 1; `rules` has the others.

See Leviathan et al., arXiv 2211.17192, section 2.3, and appendix A.5 for lenience l in (0, 1],
where l q replaces q: more guesses are accepted, and no token is more probable than p / l.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative import checks
from speculative.decoding import reference
from speculative.decoding.reference import ACCEPT, CORRECT, DRAFT
from speculative.sampling import Sampling, argmax, categorical, first, of_rows, standardise
from speculative.tree import Tree


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """How guesses are verified; a pytree, whose fields shape programs unless they are `data`.

    `verify` handles a batch on the device, in float32; a rule may have a counterpart for one row on
    the host, in float64, which the traced loop runs in its place. `docs/extending.md` shows how to
    add a rule. A rule that chooses the target's tokens before it looks at guesses (`choices`, as
    all exact rules do at temperature 0) verifies trees.

    Attributes:
        keyed_by: the key of random numbers, in addition to seed and example. "position" is the
            token's position in the text, which is exact if no emitted token depends on a number
            that a later step uses again. "step" is the position where the step began and the offset
            in it. "token" means that numbers are Gumbel noise for each token at each position.
        numbers: random numbers per position or offset; the first one draws the guess.
        by_guess: whether each guess is tested by itself, so that alpha and Eq. 1 predict the tokens
            per call; if not, `chances` of blocks of gamma guesses do (`measurement.blocks`).
    """

    by_guess: ClassVar[bool] = True
    keyed_by: ClassVar[Literal["position", "step", "token"]] = "position"
    numbers: ClassVar[int] = 3

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(cls, _parted, functools.partial(_joined, cls))

    @property
    def alone(self) -> "Rule":
        """The rule for decoding by the target alone."""
        return EXACT

    def to_guess(self, numbers: Array | np.ndarray) -> Array | np.ndarray:
        """Selects the draft's numbers [B, G] from a step's numbers [B, G + 1, numbers]."""
        return numbers[:, :-1, DRAFT]

    @property
    def data(self) -> tuple[str, ...]:
        """The fields that are program arguments: one program serves all their values."""
        return ()

    @property
    @abc.abstractmethod
    def exact(self) -> bool:
        """Whether outputs have the target's distribution."""

    @abc.abstractmethod
    def verify(
        self, guesses: Array, logits: Array, q: Array | None, sampling: Sampling, uniforms: Array
    ) -> tuple[Array, Array]:
        """Accepts a prefix of each row's guesses and chooses the token that follows it.

        Args:
            guesses: [B, G] tokens drawn from q. At temperature 0, -1 stands for no guess: it and
                those after it are not accepted.
            logits: [B, G + 1, V] of the target, float32, not standardised.
            q: [B, G, V] the draft's standardised distributions; None for deterministic proposals.
            sampling: how probabilities follow from logits, the same for target and draft.
            uniforms: [B, G + 1, numbers] in [0, 1).

        Returns:
            accepted [B], between 0 and G; next_token [B].
        """

    def choices(self, logits: Array, sampling: Sampling, numbers: Array) -> Array:
        """The target's own tokens [B, K], chosen independently of the guesses.

        Logits are [B, K, V]; numbers [B, K, ...] belong to their positions.
        """
        self.require_trees(sampling)
        return argmax(logits)

    def verify_tree(
        self, guesses: Array, logits: Array, sampling: Sampling, numbers: Array, tree: Tree
    ) -> tuple[Array, Array, Array]:
        """Accepts the longest path of the target's own tokens in each row's tree of guesses.

        The arguments are those of `verify`, but logits [B, N + 1, V] follow each place of the tree,
        and numbers [B, G + 1, ...] belong to positions.

        Returns:
            path [B, G + 1], the places of the newest token, 0, and of the accepted guesses, padded
            with 0; accepted [B], between 0 and G; next_token [B].
        """
        chosen = self.choices(logits, sampling, tree.by_place(numbers))
        return tree.longest(tree.right(guesses, chosen), chosen)

    def verifies_trees(self, sampling: Sampling) -> bool:
        """Whether the rule chooses the target's tokens before it looks at guesses."""
        return sampling.greedy and self.exact

    def require_trees(self, sampling: Sampling) -> None:
        """Raises ValueError unless the rule verifies trees."""
        if not self.verifies_trees(sampling):
            if not self.exact:
                raise checks.SettingError(
                    "tree is for exact verification, which this is not; set tree to 0, or lenience "
                    "to 1."
                )
            raise checks.SettingError(
                "tree is for temperature 0 or verification = 'coupled', because other rules test "
                "each guess against the draft's q; set tree to 0, or verification to coupled."
            )

    def verify_reference(
        self,
        guesses: list[int],
        logits: np.ndarray,
        q: np.ndarray | None,
        sampling: Sampling,
        uniforms: np.ndarray,
    ) -> tuple[int, int]:
        """See `verify`; for one row: [G], [G + 1, V], [G, V] or None, [G + 1, numbers].

        A rule without a float64 counterpart runs `verify` instead: the traced loop then does not
        test the rule's own arithmetic.
        """
        given = guesses, logits, q, uniforms
        *rows, numbers = (None if x is None else np.asarray(x)[None] for x in given)
        accepted, next_token = jax.jit(type(self).verify)(self, *rows, sampling, numbers)
        return int(accepted[0]), int(next_token[0])

    def choices_reference(
        self, logits: np.ndarray, sampling: Sampling, numbers: np.ndarray
    ) -> np.ndarray:
        """See `choices`; for one row: [K, V] and [K, ...] -> [K]."""
        return np.asarray(logits, np.float64).argmax(axis=-1)

    @abc.abstractmethod
    def acceptance(self, logits: Array, q: Array, sampling: Sampling) -> Array:
        """beta, the probability that a guess from q is accepted: [..., V], [..., V] -> [...]."""

    def chances(self, guesses: Array, logits: Array, q: Array | None, sampling: Sampling) -> Array:
        """The probabilities [B, G + 1] that 0 to G of these guesses are accepted.

        The arguments are those of `verify`; the probabilities are over its random numbers. Rules
        that are not `by_guess` must implement this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement chances.")


def _parted(rule: Rule) -> tuple[list[Any], tuple[tuple[str, ...], tuple[Any, ...]]]:
    """A rule's data fields, their names, and its other fields."""
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    data = [fields.pop(name) for name in rule.data]
    return data, (rule.data, tuple(fields.items()))


def _joined(kind: type[Rule], fields: Any, values: Iterable[Any]) -> Rule:
    """The inverse of `_parted`; values may be of any type."""
    names, others = fields
    made = object.__new__(kind)
    for name, value in (*others, *zip(names, values, strict=True)):
        object.__setattr__(made, name, value)
    return made


@dataclasses.dataclass(frozen=True)
class Token(Rule):
    """Algorithm 1: tests each guess with a random number of its own; exact at lenience l = 1.

    At temperature 0 a guess is accepted if it is the argmax; with lenience l < 1, if
    p(x) >= l max p, where p is the softmax of the target's logits (the paper prints <=, a slip).
    """

    lenience: float = 1.0

    def __post_init__(self) -> None:
        must, fits = "be a number in (0, 1]", lambda x: 0 < x <= 1
        object.__setattr__(self, "lenience", checks.real("lenience", self.lenience, must, fits))

    @property
    def data(self) -> tuple[str, ...]:
        """Lenience, unless it is 1."""
        return () if self.exact else ("lenience",)

    @property
    def exact(self) -> bool:
        """Whether lenience is 1; as an argument of a program it never is."""
        return isinstance(self.lenience, float) and self.lenience == 1

    def verify(self, guesses, logits, q, sampling, uniforms) -> tuple[Array, Array]:
        """See `Rule.verify`."""
        if sampling.greedy:
            best = argmax(logits)
            passed = guesses == best[:, :-1]
            if not self.exact:
                near = near_best(logits[:, :-1], self.lenience)
                of_guesses = jnp.take_along_axis(near, guesses[..., None], axis=-1)[..., 0]
                passed = of_guesses & (guesses >= 0)
            accepted = leading(passed)
            return accepted, following(best, accepted)
        p = standardise(logits, sampling)
        of_draft = jax.nn.one_hot(guesses, p.shape[-1]) if q is None else q
        r, correct = uniforms[:, :-1, ACCEPT], uniforms[..., CORRECT]
        sampled = verify(guesses, p, of_draft, r, correct, self.lenience)
        if not sampling.mixed:
            return sampled
        greedy, cold = self.verify(guesses, logits, q, Sampling(0.0), uniforms), sampling.cold(1)
        return jax.tree.map(functools.partial(jnp.where, cold), greedy, sampled)

    def verify_reference(self, guesses, logits, q, sampling, uniforms) -> tuple[int, int]:
        """See `Rule.verify_reference`."""
        if sampling.greedy and not self.exact:
            p = reference.standardise(logits, Sampling())
            near = p >= self.lenience * p.max(axis=-1, keepdims=True)
            accepted = [*near[np.arange(len(guesses)), guesses], False].index(False)
            return accepted, int(p[accepted].argmax())
        p = reference.standardise(logits, sampling)
        q = reference.one_hot(np.array(guesses, int), p.shape[-1]) if q is None else q
        r, correct = uniforms[:-1, ACCEPT], uniforms[:, CORRECT]
        return reference.verify(guesses, p, q, r, correct, self.lenience)

    def chances(self, guesses, logits, q, sampling) -> Array:
        """See `Rule.chances`; only for an exact rule."""
        assert self.exact
        p = standardise(logits, sampling)[:, :-1]
        q = jax.nn.one_hot(guesses, p.shape[-1]) if q is None else q
        of_guesses = [jnp.take_along_axis(x, guesses[..., None], axis=-1)[..., 0] for x in (p, q)]
        passes = jnp.minimum(1.0, of_guesses[0] / of_guesses[1])
        ends = jnp.pad(1 - passes, ((0, 0), (0, 1)), constant_values=1.0)
        return ends * jnp.cumprod(jnp.pad(passes, ((0, 0), (1, 0)), constant_values=1.0), axis=1)

    def acceptance(self, logits, q, sampling) -> Array:
        """Sum of min(p / l, q) over V (Definition 3.1, equations 3.2 to 3.5, appendix A.5).

        At temperature 0 and l < 1, it is the mass of q where p(x) >= l max p.
        """
        lenience = of_rows(self.lenience, logits.ndim)
        sampled = jnp.minimum(standardise(logits, sampling) / lenience, q).sum(axis=-1)
        if self.exact or not sampling.kinds.greedy:
            return sampled
        greedy = jnp.where(near_best(logits, self.lenience), q, 0.0).sum(axis=-1)
        return jnp.where(sampling.cold(greedy.ndim), greedy, sampled)


EXACT = Token()


def near_best(logits: Array, lenience: float | Array) -> Array:
    """Whether p(x) >= l max p, from differences of logits: [..., V] -> [..., V] bool."""
    least = jnp.log(of_rows(lenience, logits.ndim))
    return logits - logits.max(axis=-1, keepdims=True) >= least


def residual(p: Array, q: Array) -> Array:
    """The distribution after a rejected guess: max(0, p - q), not normalised, [..., V].

    Where that is 0 everywhere, because p equals q up to rounding, it is p.
    """
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(left.sum(axis=-1, keepdims=True) > 0, left, p)


def with_bonus(q: Array) -> Array:
    """Appends q = 0 after the last guess, so that the bonus token is drawn from p."""
    return jnp.pad(q, ((0, 0), (0, 1), (0, 0)))


def following(values: Array, accepted: Array) -> Array:
    """Selects the values for the token after the accepted guesses: [B, G + 1, ...] -> [B, ...]."""
    at = accepted.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, at, axis=1)[:, 0]


def leading(accepted: Array) -> Array:
    """The number of leading True values: [B, G] -> [B] int32."""
    return first(~accepted)


def verify(
    guesses: Array,
    p: Array,
    q: Array,
    accept_uniform: Array,
    correct_uniform: Array,
    lenience: float | Array = 1.0,
) -> tuple[Array, Array]:
    """The last three parts of Algorithm 1 for a batch, with standardised p [B, G + 1, V].

    Guess x_i is accepted with probability min(1, p_i(x_i) / (l q_i(x_i))), tested as r l q < p so
    that q = 0 needs no division and p = 0 is never accepted. The next token comes from the residual
    at the first rejection, or from the target's last distribution. Random numbers are [B, G] for
    the tests, and [B, G + 1] for the next token, of which the one at its position is used.
    """
    p_guess = jnp.take_along_axis(p[:, :-1], guesses[..., None], axis=-1)[..., 0]
    q_guess = jnp.take_along_axis(q, guesses[..., None], axis=-1)[..., 0]
    lenience = of_rows(lenience, 2)
    passed = accept_uniform * (lenience * q_guess) < p_guess
    accepted = leading(passed)
    values = p, with_bonus(q), correct_uniform
    p_next, q_next, uniform = (following(x, accepted) for x in values)
    return accepted, categorical(residual(p_next, lenience * q_next), uniform)
