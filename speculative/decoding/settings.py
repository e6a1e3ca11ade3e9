"""What a generation is told, what it draws, and what it gives back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from speculative.decoding.adaptive import Adaptive
from speculative.sampling import Sampling
from speculative.types import EOS_ID, Flags, Rows, Tokens

DRAFT, ACCEPT, CORRECT = 0, 1, 2
"""What the three random numbers of a position are for."""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How to decode; hashable, a static argument of jitted functions.

    Attributes:
        vocab_size: the vocabulary's pieces V; rows that pad a model beyond it are never chosen.
        sampling: temperature, top-k, top-p, the same for target and draft.
        gamma: guesses a step; 0 is autoregressive decoding, one token a target call.
        max_length: tokens after which a row ends without an end-of-sequence token.
        eos_id: the token that ends a row; it is the row's last token.
        simulated_alpha: accept each guess with this chance, whatever target and draft say: all
            is computed as ever, and what comes out is not the target's. For timing alone.
        lenience: l in (0, 1] of appendix A.5. Below 1 more guesses stand and outputs are no longer
            the target's own, but no token is likelier than p / l.
        adaptive: picks the guesses of the next steps; gamma is then the most it may pick.
    """

    vocab_size: int
    sampling: Sampling = Sampling()
    gamma: int = 0
    max_length: int = 128
    eos_id: int = EOS_ID
    simulated_alpha: float | None = None
    lenience: float = 1.0
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1 piece, not {self.vocab_size}.")
        if not isinstance(self.gamma, int) or self.gamma < 0:
            raise ValueError(f"gamma must be a whole number of guesses, not {self.gamma}.")
        if not isinstance(self.max_length, int) or self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, not {self.max_length}.")
        if not (isinstance(self.lenience, int | float) and 0 < self.lenience <= 1):
            raise ValueError(
                f"lenience must be a number in (0, 1], not {self.lenience}; 1 keeps decoding exact."
            )
        if self.adaptive and self.gamma != max(self.adaptive.gammas):
            raise ValueError(
                f"gamma must be the most that Adaptive.gammas {self.adaptive.gammas} may pick, not "
                f"{self.gamma}."
            )

    @property
    def endless(self) -> "Decoding":
        """The same, but no token ends a text: every output has all of its length."""
        return dataclasses.replace(self, eos_id=-1)

    @property
    def room(self) -> int:
        """Positions a step may touch beyond the tokens a row holds."""
        return self.gamma + 2

    @property
    def capacity(self) -> int:
        """Positions that caches, token buffer and random numbers of a generation need."""
        return self.max_length + self.room

    def cache_lengths(self) -> list[int]:
        """Cache sizes, short to long: a generation starts in the first and moves on when full."""
        last = -(-self.capacity // 16) * 16
        return [size for size in (64, 256, 1024) if self.room <= size < last] + [last]


def random_draws(seed: int, examples: Array | np.ndarray, length: int) -> Array:
    """Every random number of a generation: [B, length, 3] float32, uniform on [0, 1).

    Folded from (seed, example, position), so that they depend neither on what else is in the
    batch nor on how a position came to be decoded. A position drafted twice, because an
    earlier guess was rejected, meets the same numbers again; nothing emitted depends on their
    first use, so the output's distribution is the target's all the same.

    Args:
        seed: of the run.
        examples: [B] the number of each row's example in its task.
        length: positions; `Decoding.capacity`.
    """
    return _draws(jax.random.key(seed), jnp.asarray(examples, jnp.int32), length)


@functools.partial(jax.jit, static_argnums=2)
def _draws(key: Array, examples: Array, length: int) -> Array:
    def at(example: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.fold_in(key, example), position)
        return jax.random.uniform(folded, (3,))

    row = jax.vmap(at, in_axes=(None, 0))
    return jax.vmap(row, in_axes=(0, None))(examples, jnp.arange(length))


@struct.dataclass
class Output:
    """What a generation gives back.

    Attributes:
        tokens: [B, max_length] int32, zeros after the row's end.
        lengths: [B] tokens emitted, the end-of-sequence token included.
        target_calls: [B] passes of the target while the row was unfinished.
        tested: [B] guesses that were tested: the accepted ones and each step's first rejected.
        accepted: [B] guesses accepted (of those before the row's end).
        finite: [B] False where the target's logits were not finite.
        counts: [B, gamma, 2] what `Adaptive` keeps for the next text; zeros without it.
    """

    tokens: Tokens
    lengths: Rows
    target_calls: Rows
    tested: Rows
    accepted: Rows
    finite: Flags
    counts: Array
