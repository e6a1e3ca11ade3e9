"""The text itself as a draft, also called prompt lookup decoding (Saxena, 2023).

Where an output quotes its source or repeats itself, the text already holds the next tokens.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from speculative.drafts.base import Draft, Proposal
from speculative.ragged import read_rows, write_rows
from speculative.sampling import Sampling
from speculative.types import PADDING, Flags, PyTree, Rows


@struct.dataclass
class TextSoFar:
    """Source and output, one contiguous text per row."""

    tokens: Array  # [B, longest + S + T]: `longest` fillers of -1, the text, and stale tokens.
    ends: Rows  # The index of each row's next token.

    def extended(self, tokens: Array) -> "TextSoFar":
        """The text with tokens [B, N] appended to each row."""
        written = write_rows(self.tokens, tokens, self.ends, axis=1)
        return TextSoFar(written, self.ends + tokens.shape[1])

    def rewound(self, count: Rows) -> "TextSoFar":
        """The text without the last `count` [B] tokens of each row, neither copied nor cleared."""
        return TextSoFar(self.tokens, self.ends - count)


@dataclasses.dataclass(frozen=True)
class CopyDraft(Draft):
    """Copies the tokens after the place in source and output that is most like the text's end.

    It has no parameters, and its proposals are deterministic.

    Attributes:
        decoder_only: whether inputs are prompts, whose last token is also the first `last`.
            Otherwise they are sources, and the start token separates them from the output.
        longest: tokens compared, counted back from the last one; 1 to 30.
    """

    decoder_only: bool = False
    longest: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.longest <= 30:
            raise ValueError(f"longest must lie in [1, 30] tokens, not {self.longest}.")

    def start(self, params, inputs, cache_length, target) -> TextSoFar:
        """The text without the first `last`."""
        present, tokens = inputs != PADDING, inputs.astype(jnp.int32)
        room = (0, 0), (self.longest, cache_length)
        ends = self.longest + present.sum(axis=1, dtype=jnp.int32) - self.decoder_only
        return TextSoFar(jnp.pad(tokens, room, constant_values=-1), ends)

    def following(self, text: TextSoFar, vocab_size: int) -> tuple[Rows, Rows]:
        """The next tokens [B] that the text suggests, and the lengths [B] of their matches.

        Positions are ranked by their agreement with the text's end, read as a binary number whose
        highest bit is the last token. So a longer match wins, then more agreement before the first
        difference, then the earlier position, because a target that quotes tends to do so in
        order. Where the last token is new, it is compared as if it were the expected one.
        """
        longest, positions = self.longest, text.tokens.shape[1] - self.longest
        suffix = read_rows(text.tokens, text.ends - longest, longest)
        agreement = jnp.zeros((len(text.ends), positions), jnp.int32)
        for back in range(longest):
            shifted = text.tokens[:, longest - back : longest - back + positions]
            agrees = shifted == suffix[:, longest - 1 - back, None]
            agreement += agrees.astype(jnp.int32) << (longest - 1 - back)
        # Nothing follows the last token, and tokens beyond it are stale.
        earlier = longest + jnp.arange(positions) < text.ends[:, None] - 1
        agreement = jnp.where(earlier, agreement, 0)
        at = longest + jnp.argmax(agreement, axis=1)[:, None] + 1
        token = jnp.take_along_axis(text.tokens, at, axis=1)[:, 0]
        differs = (1 << longest) - 1 - agreement.max(axis=1)
        # A source may hold tokens outside the target's vocabulary; any guess will do then.
        return jnp.clip(token, 0, vocab_size - 1), lax.clz(differs) - (32 - longest)

    def propose(self, params, state, last, numbers, sampling, vocab_size, history=None) -> Proposal:
        """Copies one token at a time; a guess becomes part of the text that is copied from."""

        def copy(text: TextSoFar, _: None) -> tuple[TextSoFar, Rows]:
            token = self.following(text, vocab_size)[0]
            return text.extended(token[:, None]), token

        text, guesses = lax.scan(copy, state.extended(last[:, None]), length=numbers.shape[1])
        return Proposal(guesses.T, None, text)

    def sure(
        self, params: PyTree, state: TextSoFar, last: Rows, vocab_size: int, sampling: Sampling
    ) -> Flags:
        """Whether a text's end occurred before, so that the next tokens are probably the same.

        At temperature 0, three matching tokens are enough for a language model and six for an
        encoder-decoder, according to recorded guesses of the bundled models; above it, all must
        match.
        """
        matched = self.following(state.extended(last[:, None]), vocab_size)[1]
        fewer = min(3 if self.decoder_only else 6, self.longest)
        return matched >= jnp.where(sampling.cold(1), fewer, self.longest)

    def follow(self, params, state, last, guesses) -> TextSoFar:
        """The state after proposing these guesses."""
        return state.extended(jnp.concatenate([last[:, None], guesses], axis=1))

    def commit(self, params, proposal, accepted, hidden) -> TextSoFar:
        """Removes the rejected guesses."""
        return proposal.state.rewound(proposal.guesses.shape[1] - accepted)
