"""Logits processors: functions of the text so far that change the target's and draft's logits.

They come before temperature, top-k, top-p and min-p. p and q then follow from the changed logits,
at every position of a block as if each token were decoded alone, so that decoding stays exact.
"""

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from speculative import checks
from speculative.ragged import write_rows
from speculative.tree import Tree
from speculative.types import Rows, Tokens

NO_TOKEN = -1  # Fills the positions after a text's end.


class Processor(Protocol):
    """Changes the logits of one position; hashable, as a frozen dataclass is.

    It is traced by JAX, and called for every position of every row by `jax.vmap`. It must be a
    function of its arguments: a step may call it more than once for the same position.
    """

    def __call__(self, logits: Array, text: Array, length: Array) -> Array:
        """Returns the logits [V] to use instead, float32; -inf forbids a token.

        `text` [L] holds the tokens of the output so far, without the prompt, and `NO_TOKEN` from
        `length` on.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive logits of tokens in the text by the penalty, and multiplies others by it.

    See Keskar et al., CTRL, arXiv 1909.05858, section 4.1; this form suits logits of both signs.
    """

    penalty: float

    def __post_init__(self) -> None:
        must = "be a positive number"
        penalty = checks.real("penalty", self.penalty, must, lambda x: 0 < x < math.inf)
        object.__setattr__(self, "penalty", penalty)

    def __call__(self, logits: Array, text: Array, length: Array) -> Array:
        """See `Processor`."""
        size = logits.shape[-1]
        places = jnp.where(text < 0, size, text)  # Indices beyond the last one are dropped.
        present = jnp.zeros(size, bool).at[places].set(True, mode="drop")
        changed = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return jnp.where(present, changed, logits)


@struct.dataclass
class History:
    """The text of each row so far, and the processors that look at it."""

    tokens: Tokens  # [B, L]; the first `lengths` count.
    lengths: Rows
    processors: tuple[Processor, ...] = struct.field(pytree_node=False)

    def followed_by(self, tokens: Rows) -> "History":
        """The history with one more token for each row, [B]."""
        longer = write_rows(self.tokens, tokens[:, None], self.lengths, axis=1)
        return History(longer, self.lengths + 1, self.processors)

    def process(self, logits: Array) -> Array:
        """Applies the processors to the logits [B, V] of the next token.

        ValueError is raised if one changes the shape.
        """
        logits = logits.astype(jnp.float32)
        past = jnp.arange(self.tokens.shape[1]) < self.lengths[:, None]
        text = jnp.where(past, self.tokens, NO_TOKEN)
        for processor in self.processors:
            shape = logits.shape
            logits = jnp.asarray(jax.vmap(processor)(logits, text, self.lengths))
            if logits.shape != shape:
                raise ValueError(
                    f"The processor {processor!r} makes logits of shape {logits.shape[1:]} from "
                    f"logits of shape {shape[1:]}; it must return as many."
                )
        return logits.astype(jnp.float32)

    def process_block(self, logits: Array, guesses: Tokens, tree: Tree | None = None) -> Array:
        """Applies the processors to logits [B, G + 1, V] of the tokens after 0 to G guesses [B, G].

        With a tree, each place's logits are those of the token after the guesses on its path.
        """
        batch, places, _ = logits.shape
        if tree is None:
            depths, paths = jnp.arange(places)[None], guesses[:, None]
        else:
            at = jnp.maximum(tree.on_paths[..., 1:] - 1, 0)  # [B, G + 1, D]
            own = jnp.take_along_axis(guesses, at.reshape(batch, -1), axis=1)
            depths, paths = tree.depths, own.reshape(at.shape)
        return self.process_paths(logits, paths, depths)

    def process_paths(self, logits: Array, paths: Array, counts: Array) -> Array:
        """Applies the processors to logits [B, K, V] of the tokens after the beginnings of paths.

        Paths are [B, K or 1, D]; of each, the first `counts` [B or 1, K] tokens count.
        """
        batch, many, _ = logits.shape
        paths = jnp.broadcast_to(paths, (batch, many, paths.shape[2]))
        counts = jnp.broadcast_to(counts, (batch, many))

        def after(logits: Array, path: Array, count: Array) -> Array:
            tokens = write_rows(self.tokens, path, self.lengths, axis=1)
            return History(tokens, self.lengths + count, self.processors).process(logits)

        return jax.vmap(after, in_axes=1, out_axes=1)(logits, paths, counts)
