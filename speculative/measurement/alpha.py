"""The acceptance rate alpha, measured as the paper does (Definition 3.1, section 4.2)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from speculative.decoding import Params
from speculative.decoding.speculative import Models
from speculative.measurement import forcing
from speculative.pair import Pair
from speculative.sampling import Sampling, standardise
from speculative.types import Inputs, Tokens
from speculative.verification import acceptance, near_best


def alpha_on_target_text(
    pair: Pair,
    sources: Sequence[Array],
    tokens: Sequence[Sequence[int]],
    sampling: Sampling,
    max_length: int,
    lenience: float = 1.0,
) -> list[NDArray[np.float32]]:
    """beta, the sum of min(p / l, q), at every token of texts that the target generated.

    Alpha is their mean over all tokens. No guess is drawn at random and none is rejected, so
    this varies less than the share of guesses that decoding accepted.

    Args:
        pair: the target and the draft, any that has the face of one.
        sources: of each example, [1, S] as `Pair.encode` gives it.
        tokens: what the target generated for it, the end of sequence included.
        sampling: adjusts p and q alike.
        max_length: tokens to which every text is padded, for each width is a compiled program.
        lenience: l (A.5). At temperature 0 and below 1, beta is the mass of q where p(x) >=
            l max p, p being the target's own distribution.

    Returns:
        Of each example, beta [length] at each of its tokens.

    Raises:
        ValueError: the probabilities of target or draft are not finite.
    """
    models = Models(pair.target, pair.draft)
    found = []
    for source, text in zip(sources, tokens, strict=True):
        row = forcing.padded(text, max_length)
        beta = _betas(models, pair.params, source, row, sampling, pair.vocabulary.size, lenience)
        found.append(np.asarray(beta)[0, : len(text)])
        if not np.isfinite(found[-1]).all():
            raise ValueError(
                f"The probabilities of {pair.names[0]} or {pair.names[1]} are not finite: its "
                "weights are damaged, or its dtype is too narrow for it."
            )
    return found


@functools.partial(jax.jit, static_argnames=("models", "sampling", "vocab_size", "lenience"))
def _betas(
    models: Models,
    params: Params,
    source: Inputs,
    tokens: Tokens,
    sampling: Sampling,
    vocab_size: int,
    lenience: float,
) -> Array:
    """Beta [B, L] at each of tokens [B, L], which the draft is fed one by one."""
    draft = models.draft
    assert draft is not None, "an acceptance rate needs a draft"
    batch, length = tokens.shape
    logits = forcing.logits(models.target, params.target, source, tokens)[..., :vocab_size]
    nothing = jnp.zeros(batch, jnp.int32)
    # q does not depend on the random number that a guess is drawn with.
    uniforms = jnp.zeros((batch, 1))

    def at(state: Any, both: tuple[Array, Array]) -> tuple[Any, Array]:
        last, row = both
        proposal = draft.propose(params.draft, state, last, uniforms, sampling, vocab_size)
        q = proposal.q
        q = jax.nn.one_hot(proposal.guesses, vocab_size) if q is None else q
        if sampling.greedy and lenience < 1:
            beta = jnp.where(near_best(row, lenience), q[:, 0], 0.0).sum(axis=-1)
        else:
            beta = acceptance(standardise(row, sampling), q[:, 0], lenience)
        return draft.commit(proposal, nothing), beta

    # Two more positions: a draft may catch up with a chunk of two.
    begun = models.target.start(params.target, source, 1)
    state = draft.start(params.draft, source, length + 2, begun)
    along = (forcing.previous(tokens, models.target.first(source)).T, logits.swapaxes(0, 1))
    return lax.scan(at, state, along)[1].T
