"""The text itself as a draft: what followed when it last read like this.

Known as prompt lookup decoding (Saxena, 2023): where an output quotes its source, or repeats
itself, the next tokens have been seen already. There is no model and nothing is learned.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Proposal
from speculative.models.cache import read_rows, write_rows
from speculative.sampling import Sampling
from speculative.types import PAD_ID, Inputs, PyTree, Rows


@struct.dataclass
class Text:
    """Source and output, one contiguous text a row.

    Attributes:
        tokens: [B, longest + S + T]; `longest` fillers of -1 come before the text, and what
            lies at or beyond its end is stale.
        ends: [B] where each row's next token goes.
    """

    tokens: Array
    ends: Rows


def append(text: Text, tokens: Rows) -> Text:
    """The text with one token [B] more."""
    return Text(write_rows(text.tokens, tokens[:, None], text.ends, axis=1), text.ends + 1)


def rewind(text: Text, count: Rows) -> Text:
    """The text without its last `count` [B] tokens; nothing is copied or cleared."""
    return Text(text.tokens, text.ends - count)


@dataclasses.dataclass(frozen=True)
class CopyDraft:
    """Guesses what followed the place in source and output that is most like the text's end.

    It has no parameters, and its guesses are certain: q is None.

    Attributes:
        continues: whether outputs continue the inputs, as those of decoder-only models do.
            Inputs are then padded with -1, and the last token of each comes again as the first
            `last`; otherwise they are sources, padded with 0, which the start token divides
            from the output.
        longest: tokens compared, from the last one back; 1 to 30.

    Raises:
        ValueError: `longest` outside its range.
    """

    continues: bool = False
    longest: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.longest <= 30:
            raise ValueError(f"longest must lie in [1, 30] tokens, not {self.longest}.")

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> Text:
        """The text before the first `last`."""
        present = inputs >= 0 if self.continues else inputs != PAD_ID
        tokens = jnp.pad(
            jnp.where(present, inputs, -1).astype(jnp.int32),
            ((0, 0), (self.longest, cache_length)),
            constant_values=-1,
        )
        ends = self.longest + present.sum(axis=1, dtype=jnp.int32) - self.continues
        return Text(tokens, ends)

    def following(self, text: Text, vocab_size: int) -> tuple[Rows, Rows]:
        """What the text so far suggests as its next token, and how well.

        The places a token could be copied from are ranked by where they agree with the text's
        end, read as a binary number: the last token is its highest bit. So a longer match wins,
        then what agrees beyond the first difference, then the earlier place, for a target that
        quotes tends to do so in order; and where the last token is new, it stands in for the
        one that was expected.

        Returns:
            Tokens [B] below `vocab_size`, and the lengths [B] of their matches, at most
            `longest`.
        """
        longest, places = self.longest, text.tokens.shape[1] - self.longest
        suffix = read_rows(text.tokens, text.ends - longest, longest)
        agreement = jnp.zeros((len(text.ends), places), jnp.int32)
        for back in range(longest):
            shifted = text.tokens[:, longest - back : longest - back + places]
            agrees = shifted == suffix[:, longest - 1 - back, None]
            agreement += agrees.astype(jnp.int32) << (longest - 1 - back)
        # The last token itself has nothing after it, and what lies beyond is stale.
        earlier = longest + jnp.arange(places) < text.ends[:, None] - 1
        agreement = jnp.where(earlier, agreement, 0)
        at = longest + jnp.argmax(agreement, axis=1)[:, None] + 1
        token = jnp.take_along_axis(text.tokens, at, axis=1)[:, 0]
        differs = (1 << longest) - 1 - agreement.max(axis=1)
        # A source may hold what the target never says; any token will do there.
        return jnp.clip(token, 0, vocab_size - 1), lax.clz(differs) - (32 - longest)

    def propose(
        self,
        params: PyTree,
        state: Text,
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        """Copies a token at a time; guesses are text, so that one can be copied in its turn."""

        def guess(text: Text, _: None) -> tuple[Text, Rows]:
            token = self.following(text, vocab_size)[0]
            return append(text, token), token

        text, guesses = lax.scan(guess, append(state, last), length=uniforms.shape[1])
        return Proposal(guesses.T, None, text)

    def commit(self, proposal: Proposal, accepted: Rows) -> Text:
        """The text up to the last accepted guess."""
        return rewind(proposal.state, proposal.guesses.shape[1] - accepted)
