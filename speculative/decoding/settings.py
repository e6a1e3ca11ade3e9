"""A generation's settings, random numbers and output."""

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from speculative import checks, noise
from speculative.decoding.rule import EXACT, Rule
from speculative.processors import History, Processor
from speculative.ragged import power_of_two, read_rows
from speculative.sampling import Kinds, Sampling
from speculative.tree import Growth
from speculative.types import EOS_ID, Flags, Rows, Tokens


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Decoding:
    """The settings of a generation.

    This is a pytree of `sampling`, `max_length` and the rule's data: one program serves all their
    values, of `max_length` up to the next power of two. Inside programs they may be arrays [B] with
    a value per row, as `together` makes them.

    Attributes:
        vocab_size: tokens V in the vocabulary; a model's tokens beyond them are never chosen.
        sampling: temperature, top-k, top-p and min-p, the same for target and draft.
        gamma: guesses per step, or the depth of a tree; 0 is autoregressive decoding, one token per
            target call.
        max_length: tokens after which a row ends without an end-of-sequence token.
        eos_ids: tokens, if any, each of which ends a row, as its last token.
        rule: how guesses are verified.
        logprobs: whether to keep the log-probabilities of the tokens.
        processors: functions that change logits before `sampling`, in order.
        growing: whether caches grow with the text. On a TPU they never do: there they are a few
            percent of the data a step reads, and its compiler schedules larger ones worse.
        tree: guesses in a step's tree; 0 is a chain.
        shares: see `tree.Growth`.
    """

    vocab_size: int
    sampling: Sampling = Sampling()
    gamma: int = 0
    max_length: int = 128
    eos_ids: tuple[int, ...] = (EOS_ID,)
    rule: Rule = EXACT
    logprobs: bool = False
    processors: tuple[Processor, ...] = ()
    growing: bool = True
    tree: int = 0
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        bounds = ("vocab_size", 1, None), ("gamma", 0, None), ("max_length", 1, checks.MAX_TOKENS)
        for name, low, high in bounds:
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), low, high))
        checks.instance("sampling", self.sampling, Sampling)
        checks.whole("tree", self.tree, 0)
        _ = self.growth  # This checks the number.
        checks.instance("rule", self.rule, Rule)
        checks.instance("logprobs", self.logprobs, bool)
        checks.instance("growing", self.growing, bool)
        checks.instance("eos_ids", self.eos_ids, tuple)
        for token in self.eos_ids:
            checks.whole("A token of eos_ids", token, 0)
        checks.instance("processors", self.processors, tuple)
        for processor in self.processors:
            with contextlib.suppress(TypeError):
                if callable(processor) and isinstance(hash(processor), int):
                    continue
            raise ValueError(
                "A processor must be a function, or a frozen dataclass with __call__ whose fields "
                f"can be hashed (a tuple, not a list), not {processor!r}."
            )

    @classmethod
    def together(cls, rows: Sequence["Decoding"], kinds: Kinds) -> "Decoding":
        """The settings of a batch whose rows share a `program`, with sampling of these kinds.

        One cache size serves all rows, long and short.
        """
        sampling = Sampling.together([row.sampling for row in rows], kinds)
        others = [(row.rule, row.max_length) for row in rows]
        rule, max_length = jax.tree.map(lambda *values: np.array(values), *others)
        fixed = dataclasses.replace(rows[0], growing=False).tree_flatten()[1]
        return cls.tree_unflatten(fixed, (sampling, rule, max_length))

    @property
    def program(self) -> Hashable:
        """The part of the settings that all rows of a batch must share."""
        return jax.tree.structure(dataclasses.replace(self, sampling=Sampling()))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The values that are data, and those that shape programs."""
        values, fixed = ([getattr(self, name) for name in names] for names in (_DATA, _FIXED))
        return tuple(values), tuple(fixed)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], values: tuple[Any, ...]) -> "Decoding":
        """The inverse of `tree_flatten`; values may be of any type."""
        made = object.__new__(cls)
        made.__dict__.update(zip((*_DATA, *_FIXED), (*values, *fixed), strict=True))
        return made

    @functools.cached_property
    def longest(self) -> int:
        """The largest `max_length` in the same program."""
        return power_of_two(self.max_length)

    def ends(self, tokens: Array) -> Array:
        """Whether each of the tokens ends a row."""
        return (tokens[..., None] == np.array(self.eos_ids, np.int32)).any(axis=-1)

    @property
    def alone(self) -> "Decoding":
        """The same settings without a draft."""
        return dataclasses.replace(self, gamma=0, tree=0, rule=self.rule.alone)

    @functools.cached_property
    def growth(self) -> Growth | None:
        """How a step's tree grows; None for a chain."""
        return Growth(self.tree, self.gamma, self.shares) if self.tree else None

    @property
    def guesses(self) -> int:
        """Guesses G per step, in a chain or a tree."""
        return self.tree or self.gamma

    @property
    def ranks(self) -> int:
        """Ranks R by which accepted guesses are counted."""
        return Growth.BRANCHES if self.tree else 1

    @property
    def room(self) -> int:
        """Positions a step may touch beyond the tokens a row holds."""
        return max(self.guesses, self.growth.read if self.growth else 0) + 2

    @property
    def capacity(self) -> int:
        """Positions in a generation's caches, token buffer and random numbers."""
        return self.longest + self.room

    def cache_lengths(self) -> list[int]:
        """Cache sizes, ascending: a generation starts with the first and grows to the next."""
        last = -(-self.capacity // 16) * 16
        grows = self.growing and jax.default_backend() != "tpu"
        # Each size is another program, and a few more positions cost a step nothing.
        smaller = (64, 256, 1024, 4096, 16384) if grows else ()
        return [size for size in smaller if self.room <= size <= last // 4] + [last]

    def history(self, tokens: Tokens, lengths: Rows) -> History | None:
        """The rows' text so far, [B, L] and [B], for the processors, if there are any."""
        return History(tokens, lengths, self.processors) if self.processors else None

    def draws(self, seed: int, examples: Array | np.ndarray) -> Array:
        """All random numbers of a generation, uniform on [0, 1): float32 [B, positions, numbers].

        They are folded from (seed, example, position), so they depend neither on other rows nor on
        earlier steps. A position that is drafted twice, because an earlier guess was rejected, uses
        the same numbers again; decoding is still exact if no emitted token depends on their first
        use. Rules keyed by the step (`Rule.keyed_by`) have numbers for each offset from the
        position where it began: [B, positions, gamma + 1, numbers]. For rules keyed by the token,
        the result is the keys, [B, 2] uint32, from which a step makes its noise. `examples` [B] are
        the numbers of the examples in a task.
        """
        seed = checks.whole("seed", seed, 0, 2**32 - 1)  # Other seeds would wrap around.
        if self.rule.keyed_by == "token":
            return noise.keys_of(seed, examples)
        # One dispatch, since each costs as much as the numbers of a text.
        return _draws(np.uint32(seed), examples, self.draws_struct(0).shape[1:])

    def draws_struct(self, batch: int) -> jax.ShapeDtypeStruct:
        """Shape and type of the random numbers for `batch` rows."""
        if self.rule.keyed_by == "token":
            return jax.ShapeDtypeStruct((batch, 2), np.uint32)
        if self.rule.keyed_by == "step":  # For the positions at which a step may begin.
            shape = batch, self.longest, self.gamma + 1, self.rule.numbers
        else:
            # A few more than needed, so that most gammas share the program that draws them.
            room = -(-(self.gamma + 2) // 16) * 16
            shape = batch, self.longest + room, self.rule.numbers
        return jax.ShapeDtypeStruct(shape, np.float32)

    def check_draws(self, draws: Array, batch: int) -> None:
        """Raises ValueError unless there are numbers for every row and position that may be read.

        A read beyond the last position would be shifted back silently and use numbers twice.
        """
        needed = self.draws_struct(batch)
        fits = draws.ndim == len(needed.shape) and np.greater_equal(draws.shape, needed.shape).all()
        fits = fits and (draws.shape[0], draws.shape[-1]) == (batch, needed.shape[-1])
        if not fits or draws.dtype != needed.dtype:
            raise ValueError(
                f"Random numbers of shape {draws.shape} and type {draws.dtype} do not fit {batch} "
                f"rows with max_length = {self.max_length} and gamma = {self.gamma}, which need "
                f"{needed.shape} of {needed.dtype}, keyed by the {self.rule.keyed_by}; draw them "
                "with Decoding.draws."
            )

    def step_draws(self, draws: Array, lengths: Rows) -> Array:
        """The numbers [B, gamma + 1, numbers] of a step that begins after `lengths` [B] tokens.

        For a rule keyed by the token, they are the noise [B, gamma + 1, V].
        """
        if self.rule.keyed_by == "token":
            return noise.gumbel(draws, lengths, self.gamma + 1, self.vocab_size)
        if self.rule.keyed_by == "step":  # A row of `max_length` tokens has finished.
            return read_rows(draws, lengths, 1)[:, 0, : self.gamma + 1]
        return read_rows(draws, lengths, self.gamma + 1)


_DATA = "sampling", "rule", "max_length"
_FIXED = "vocab_size", "gamma", "eos_ids", "logprobs", "processors", "growing", "longest"
_FIXED += "tree", "shares"


@functools.partial(jax.jit, static_argnums=2)
def _draws(seed: Array, examples: Array, shape: tuple[int, ...]) -> Array:
    """Numbers [B, *shape], whose keys are folded from seed, example and place."""
    *places, numbers = shape
    keys = jax.random.key(seed, impl="threefry2x32")  # Whatever JAX's default is.
    for fold in (examples.astype(jnp.int32), *map(jnp.arange, places)):
        keys = jnp.vectorize(jax.random.fold_in)(keys[..., None], fold)
    draw = functools.partial(jax.random.uniform, shape=(numbers,))
    return jnp.vectorize(draw, signature="()->(n)")(keys)


@struct.dataclass
class Output:
    """The result of a generation."""

    tokens: Tokens  # [B, longest] int32, zeros after the row's end.
    lengths: Rows  # Tokens emitted, including the end-of-sequence token.
    target_calls: Rows  # Passes of the target while the row was unfinished.
    drafted: Rows  # Guesses proposed.
    # [B, gamma, 1 + R] int32, by depth in a step: guesses tested, with all those of a tree at one
    # depth counted once, and those accepted, by their rank among the guesses after the same token;
    # R is 1 for chains.
    by_position: Array
    finite: Flags  # Whether the target's logits were finite.
    fault: Rows  # The draft's first fault, an index into `drafts.base.FAULTS`; 0 for none.
    logprobs: Array  # [B, longest] float32, from `sampling.log_probabilities`; [B, 0] if not kept.

    @property
    def tested(self) -> Rows:
        """Guesses tested: the accepted ones and each step's first rejected one."""
        return self.by_position[..., 0].sum(axis=-1)

    @property
    def accepted(self) -> Rows:
        """Guesses accepted, before the row's end."""
        return self.by_position[..., 1:].sum(axis=(-2, -1))
