"""From logits to standardised probabilities, and from probabilities to a token.

Every way of sampling (argmax, temperature, top-k, nucleus, min-p) becomes sampling from an adjusted
distribution, the same for the target's p and the draft's q (Leviathan et al., section 2.2).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative import checks
from speculative.backends.cpu.kernels import softmax

# Logits divided by a smaller temperature may overflow float32; argmax has temperature 0.
SMALLEST_TEMPERATURE = 1e-6
_BLOCK = 128
# Fields of `Sampling`, in the order of `Kinds`.
_NAMES = ("temperature", "top_k", "top_p", "min_p")


class Kinds(NamedTuple):
    """The kinds of sampling that rows of a batch use; they shape programs, values do not."""

    greedy: bool  # Temperature 0.
    sampled: bool  # Another temperature.
    top_k: bool
    top_p: bool
    min_p: bool

    @classmethod
    def of(cls, rows: Iterable["Sampling"]) -> "Kinds":
        """The kinds that any of the rows uses."""
        return cls(*map(any, zip(*(row.kinds for row in rows), strict=True)))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits.

    It is a pytree of the values in use: one program serves all values of the same `kinds`. Inside
    programs, values may be arrays [B], one for each row, as `together` makes them. A token is kept
    if top-k, top-p and min-p (Nguyen et al., arXiv 2407.01082) all keep it.
    """

    temperature: float = 1.0  # 0 is argmax; 1 is the model's own distribution.
    top_k: int = 0  # Keep the k most probable tokens (ties with the k-th stay); 0 keeps all.
    top_p: float = 1.0  # Keep the fewest most probable tokens of at least this total probability.
    min_p: float = 0.0  # Keep tokens of at least this fraction of the greatest probability.

    def __post_init__(self) -> None:
        least = SMALLEST_TEMPERATURE
        temperatures = f"be 0 (argmax) or a number of at least {least}"
        for name, must, fits in (
            ("temperature", temperatures, lambda x: x == 0 or least <= x < math.inf),
            ("top_p", "lie in (0, 1]", lambda x: 0 < x <= 1),
            ("min_p", "lie in [0, 1]", lambda x: 0 <= x <= 1),
        ):
            object.__setattr__(self, name, checks.real(name, getattr(self, name), must, fits))
        object.__setattr__(self, "top_k", checks.whole("top_k", self.top_k, 0, 2**31 - 1))

    @functools.cached_property
    def kinds(self) -> Kinds:
        """The kinds of sampling in use."""
        sampled = self.temperature != 0
        kept = self.top_k > 0, self.top_p < 1, self.min_p > 0
        return Kinds(not sampled, sampled, *(sampled and used for used in kept))

    @classmethod
    def together(cls, rows: Sequence["Sampling"], kinds: Kinds) -> "Sampling":
        """The sampling of a batch, in a program for rows of these kinds."""
        values = [np.array([getattr(row, name) for row in rows]) for name in _NAMES]
        return cls.tree_unflatten(kinds, itertools.compress(values, kinds[1:]))

    def tree_flatten(self) -> tuple[tuple[Any, ...], Kinds]:
        """The values that are in use, and the kinds."""
        used = itertools.compress(_NAMES, self.kinds[1:])
        return tuple(getattr(self, name) for name in used), self.kinds

    @classmethod
    def tree_unflatten(cls, kinds: Kinds, values: Iterable[Any]) -> "Sampling":
        """The inverse of `tree_flatten`; values may be of any type."""
        used = zip(itertools.compress(_NAMES, kinds[1:]), values, strict=True)
        made = object.__new__(cls)  # Values not in use are the class's defaults, or argmax.
        vars(made).update(temperature=0.0, kinds=kinds)
        vars(made).update(used)
        return made

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot."""
        return not self.kinds.sampled

    @property
    def mixed(self) -> bool:
        """Whether the distributions of some rows are one-hot, and those of others are not."""
        return self.kinds.greedy and self.kinds.sampled

    @property
    def truncated(self) -> bool:
        """Whether top-k, top-p or min-p is in use."""
        return self.kinds.top_k or self.kinds.top_p or self.kinds.min_p

    def cold(self, rank: int) -> Array:
        """Which rows are at temperature 0, shaped for arrays of `rank` axes."""
        return of_rows(jnp.asarray(self.temperature), rank) == 0


def of_rows(value: float | Array, rank: int) -> Array:
    """A scalar as it is, or values [B] of rows, shaped for arrays [B, ...] of `rank` axes."""
    shaped: Any = value if jnp.ndim(value) == 0 else jnp.reshape(value, (-1, *[1] * (rank - 1)))
    return shaped


def standardise(logits: Array, sampling: Sampling) -> Array:
    """The distribution to sample from: logits [..., V] -> float32 probabilities [..., V]."""
    logits, kinds = logits.astype(jnp.float32), sampling.kinds
    if sampling.greedy:
        return _one_hot(logits)
    values = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    temperature, top_k, top_p, min_p = (of_rows(value, logits.ndim) for value in values)
    cold = sampling.cold(logits.ndim) if sampling.mixed else None
    # XLA would otherwise multiply by the inverse of a single temperature, but divide by the
    # temperatures of rows, which rounds differently.
    scaled = logits * (1.0 / (temperature if cold is None else jnp.where(cold, 1.0, temperature)))
    if kinds.top_k:

        def as_many(kept: Array) -> Array:
            return kept.sum(axis=-1, keepdims=True) >= top_k

        # Rows of a batch that do not use it are left as they are, here and below.
        scaled = jnp.where(_fewest(scaled, as_many) | (top_k == 0), scaled, -jnp.inf)
    probabilities = softmax(scaled)

    def only(kept: Array, used: Array) -> Array:
        chosen = jnp.where(kept, probabilities, 0.0)
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
        return jnp.where(used, chosen, probabilities)

    if kinds.top_p:

        def enough(kept: Array) -> Array:
            return jnp.where(kept, probabilities, 0.0).sum(axis=-1, keepdims=True) >= top_p

        probabilities = only(_fewest(probabilities, enough), top_p < 1)
    if kinds.min_p:
        least = min_p * probabilities.max(axis=-1, keepdims=True)
        probabilities = only(probabilities >= least, min_p > 0)
    return probabilities if cold is None else jnp.where(cold, _one_hot(logits), probabilities)


def greatest_few(values: Array, count: int) -> tuple[Array, Array]:
    """The greatest of values [..., V], descending, and their indices: [..., count] each.

    Equal values come in order of their indices.
    """
    few = functools.partial(_one_by_one, count=count)

    def sorted_(values: Array) -> tuple[Array, Array]:
        best, at = lax.top_k(values, count)
        return best, at

    return lax.platform_dependent(values, tpu=few, default=sorted_)


def _one_by_one(values: Array, count: int) -> tuple[Array, Array]:
    """`greatest_few` for a TPU, which would sort all; each pass finds a value and its index."""
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    picked = list[tuple[Array, Array]]()

    def greater(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        before = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        best, at = (jnp.where(before, a, b) for a, b in zip(one, other, strict=True))
        return best, at

    nothing = np.float32(-np.inf), np.int32(values.shape[-1] - 1)
    for _ in range(count):
        best, at = lax.reduce((values, index), nothing, greater, (values.ndim - 1,))
        picked.append((best, at))
        values = jnp.where(index == at[..., None], -jnp.inf, values)
    best, at = (jnp.stack(each, axis=-1) for each in zip(*picked, strict=True))
    return best, at


def _one_hot(logits: Array) -> Array:
    return jax.nn.one_hot(argmax(logits), logits.shape[-1])


def log_weights(logits: Array, sampling: Sampling) -> Array:
    """Log p of the distribution to sample from, [..., V], up to a constant for each row."""
    if sampling.mixed or sampling.truncated:
        return jnp.log(standardise(logits, sampling))
    return logits.astype(jnp.float32) * (1.0 / of_rows(sampling.temperature, logits.ndim))


def choose(logits: Array, sampling: Sampling, noise: Array) -> Array:
    """The token [...] with the greatest log p + noise, for logits and Gumbel noise [..., V].

    It is distributed as p (see `noise`); at temperature 0 it is the argmax.
    """
    return argmax(logits if sampling.greedy else log_weights(logits, sampling) + noise)


def log_probabilities(logits: Array, tokens: Array, sampling: Sampling) -> Array:
    """The natural logarithms of the probabilities [...] with which tokens [...] are drawn.

    At temperature 0, where nothing is drawn, they are those of the model's own distribution.
    """
    p = standardise(logits, Sampling() if sampling.greedy else sampling)
    if sampling.mixed:
        p = jnp.where(sampling.cold(logits.ndim), standardise(logits, Sampling()), p)
    return jnp.log(jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0])


def _fewest(values: Array, enough: Callable[[Array], Array]) -> Array:
    """Marks the fewest of the greatest values [..., V] that are `enough`, including ties.

    `enough` takes the kept values, bool [..., V], and decides for each row, [..., 1]. If even all
    are not enough, all are kept. The least value kept is found bit by bit: on CPU a sort of 8,000
    values takes 12 times as long.
    """
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # Whole numbers in the floats' order.
    limits = jnp.iinfo(jnp.int32)
    low = jnp.full((*values.shape[:-1], 1), limits.min, jnp.int32)

    def halve(_: Array, between: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = between
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # The sum would overflow.
        kept = enough(ordered >= middle)
        return jnp.where(kept, middle, low), jnp.where(kept, high, middle)

    least, _ = lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, limits.max)))
    return ordered >= least


def argmax(logits: Array) -> Array:
    """The first token of the greatest logit: [..., V] -> [...] int32.

    On CPU it runs over the maxima of blocks, then inside the first block with the maximum: with
    XLA's argmax of the whole vocabulary a small model's step is a quarter slower. On a TPU, blocks
    would need another layout, which takes as long as two passes.
    """
    return lax.platform_dependent(logits, tpu=_first_greatest, default=_argmax_by_block)


def _first_greatest(logits: Array) -> Array:
    at = first(logits == logits.max(axis=-1, keepdims=True))
    return jnp.minimum(at, logits.shape[-1] - 1)  # If a logit is NaN, `first` gives V.


def _argmax_by_block(logits: Array) -> Array:
    blocks = _blocks(logits, -jnp.inf)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)[..., None]
    chosen = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
    return (block[..., 0] * blocks.shape[-1] + jnp.argmax(chosen, axis=-1)).astype(jnp.int32)


def greatest(logits: Array, sampling: Sampling) -> Array:
    """The greatest logit, or NaN if there is one: [..., V] -> [...].

    On CPU at temperature 0 it comes from the argmax, which sampling computes too.
    """

    def of_argmax(logits: Array) -> Array:
        return jnp.take_along_axis(logits, _argmax_by_block(logits)[..., None], axis=-1)[..., 0]

    def plain(logits: Array) -> Array:
        return logits.max(axis=-1)

    return lax.platform_dependent(
        logits, cpu=of_argmax if sampling.greedy else plain, default=plain
    )


def _blocks(values: Array, filler: float) -> Array:
    """[..., V] -> [..., V / _BLOCK, _BLOCK], or one block if V is less than `_BLOCK`."""
    size = values.shape[-1]
    width = min(size, _BLOCK)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -size % width)]
    padded = jnp.pad(values, padding, constant_values=filler)
    return padded.reshape(*values.shape[:-1], -1, width)


def first(flags: Array) -> Array:
    """The index of the first True, or N if there is none: [..., N] -> [...] int32.

    It is a minimum, because XLA on CPU needs a dozen buffers for an argmax, and every dispatch sets
    up the buffers of all its loops.
    """
    size = flags.shape[-1]
    return jnp.min(jnp.where(flags, jnp.arange(size), size), axis=-1, initial=size)


def categorical(weights: Array, uniform: Array) -> Array:
    """Draws by inversion: the first token whose running sum exceeds the share `uniform` of the sum.

    `weights` [..., V] are not negative and not all 0, `uniform` [...] is in [0, 1), and tokens are
    [...] int32, never one of weight 0. A draw takes one number, so that the host can repeat it in
    float64. The sum runs over blocks, then inside the chosen block, because a scan of the whole
    vocabulary is slow.
    """
    if weights.shape[-1] <= _BLOCK:
        return _invert(weights, uniform * weights.sum(axis=-1))[0]
    blocks = _blocks(weights, 0.0)
    sums = blocks.sum(axis=-1)
    block, rest = _invert(sums, uniform * sums.sum(axis=-1))
    chosen = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * _BLOCK + _invert(chosen, rest)[0]


def _invert(weights: Array, threshold: Array) -> tuple[Array, Array]:
    """The first index whose running sum exceeds `threshold`, and what is left of that before it."""
    running = jnp.cumsum(weights, axis=-1)
    # If rounding puts the threshold at or above the last sum, the result is the index at which
    # that sum is first reached, which has positive weight.
    index = first(~((running <= threshold[..., None]) & (running < running[..., -1:])))
    at = index[..., None]
    before = jnp.take_along_axis(running - weights, at, axis=-1)[..., 0]
    return index, jnp.maximum(threshold - before, 0.0)
