"""A bigram table as a draft: c is next to nothing, alpha modest (section 3.6)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.drafts.base import Proposal
from speculative.sampling import Sampling, categorical, standardise
from speculative.types import PAD_ID, Inputs, PyTree, Rows


@dataclasses.dataclass(frozen=True)
class BigramDraft:
    """Guesses from the frequencies of what followed the last token in a corpus.

    Its parameters are {"log_counts": [V, V]}, a row for each previous token; see `bigram_params`.
    """

    def start(self, params: PyTree, inputs: Inputs, cache_length: int, target: Any) -> tuple[()]:
        """Nothing to remember: the last token is all the context there is."""
        return ()

    def propose(
        self,
        params: PyTree,
        state: tuple[()],
        last: Rows,
        uniforms: Array,
        sampling: Sampling,
        vocab_size: int,
    ) -> Proposal:
        """Walks the table, one row a guess."""
        token, guesses, distributions = last, [], []
        for i in range(uniforms.shape[1]):
            q = standardise(params["log_counts"][token, :vocab_size], sampling)
            token = categorical(q, uniforms[:, i])
            guesses.append(token)
            distributions.append(q)
        return Proposal(jnp.stack(guesses, axis=1), jnp.stack(distributions, axis=1), state)

    def commit(self, proposal: Proposal, accepted: Rows) -> tuple[()]:
        """Nothing to remember."""
        return proposal.state


def count_bigrams(sequences: list[np.ndarray], start: int = PAD_ID) -> dict[str, np.ndarray]:
    """How often each token followed each other one: {"previous", "following", "count"}.

    Sparse, three arrays of one entry a pair seen, so a corpus's counts are a small file.

    Args:
        sequences: arrays [length] of tokens, each ending with its end-of-sequence token.
        start: the token from which decoding starts, put before each sequence.

    Raises:
        ValueError: there is nothing to count, or a token is negative.
    """
    sequences = [np.asarray(sequence) for sequence in sequences if len(sequence)]
    if not sequences:
        raise ValueError("Counting bigrams needs at least one sequence that is not empty.")
    if (smallest := min(int(sequence.min()) for sequence in sequences)) < 0:
        raise ValueError(f"Token {smallest} is negative; bigrams are counted over vocabulary ids.")
    previous = np.concatenate([np.concatenate([[start], s[:-1]]) for s in sequences])
    following = np.concatenate(sequences)
    pairs, count = np.unique(np.stack([previous, following]), axis=1, return_counts=True)
    return {
        "previous": pairs[0].astype(np.int32),
        "following": pairs[1].astype(np.int32),
        "count": count.astype(np.int32),
    }


def bigram_params(counts: dict[str, np.ndarray], vocab_size: int, smoothing: float = 1.0) -> PyTree:
    """Parameters of a `BigramDraft` from `count_bigrams`: a dense [V, V] float16 table.

    A row mixes what followed a token with the unigram frequencies, which weigh as much as
    `smoothing` observations: a token never seen still has a proper row.

    Raises:
        ValueError: a token outside the vocabulary, or no smoothing.
    """
    largest = max(int(counts["previous"].max()), int(counts["following"].max()))
    if largest >= vocab_size:
        raise ValueError(
            f"The bigram counts hold token {largest}, beyond a vocabulary of {vocab_size} pieces: "
            "count them again with this vocabulary."
        )
    if not smoothing > 0:
        raise ValueError(f"Bigram smoothing must be positive, not {smoothing}.")
    table = np.zeros((vocab_size, vocab_size), np.float32)
    table[counts["previous"], counts["following"]] = counts["count"]
    unigram = table.sum(axis=0) + 1.0 / vocab_size
    table += smoothing * unigram / unigram.sum()
    return {"log_counts": jnp.asarray(np.log(table), jnp.float16)}
