"""The acceptance rate alpha, measured as the paper does (Definition 3.1, section 4.2)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from numpy.typing import NDArray

from speculative.decoding import Decoding, Params, Rule
from speculative.decoding.loop import Models
from speculative.decoding.programs import Program
from speculative.drafts.base import Proposal, fault_of
from speculative.grouping import batches, filled
from speculative.measurement import teacher_forced
from speculative.models.interface import Started
from speculative.pair import Pair
from speculative.sampling import Sampling
from speculative.types import Inputs, Logits, Rows, State, Tokens


def alpha_on_target_text(
    pair: Pair,
    sources: Sequence[Array],
    tokens: Sequence[Sequence[int]],
    config: Decoding,
    batch_size: int = 1,
) -> list[NDArray[np.float32]]:
    """Beta [length], the acceptance by `Rule.acceptance`, at every token of the target's outputs.

    Alpha is their mean over all tokens. As no guess or rejection is drawn at random, its variance
    is lower than that of the share of guesses that decoding accepts.

    Sources are [1, S]. Outputs, with their end of sequence, are padded to `max_length` tokens, so
    that one program is compiled, and up to `batch_size` are scored together. Raises ValueError if
    the probabilities of target or draft are not finite.
    """
    alone = Models(pair.target, None), Params(pair.params.target)
    both = Models(pair.target, pair.draft), pair.params
    layers, how = pair.draft.layers, (config.sampling, config.rule, config.vocab_size)
    betas = [np.zeros(0, np.float32)] * len(sources)
    for chosen, places in batches(range(len(sources)), lambda i: sources[i].shape[1], batch_size):
        source = jnp.concatenate([sources[place] for place in places])
        rows = filled([tokens[place] for place in places], config.max_length)
        read = reading(*alone, source, rows, layers)
        of_batch = acceptances(*both, source, rows, read, *how)
        for place, beta in zip(chosen, np.asarray(of_batch), strict=False):
            betas[place] = beta[: len(tokens[place])]
            if not np.isfinite(betas[place]).all():
                raise ValueError(
                    f"The probabilities of {pair.names[0]} or {pair.names[1]} are not finite: "
                    "its weights are damaged, or its dtype is too narrow for it; or the draft "
                    "breaks the contract of drafts (Pair.check tells where)."
                )
    return betas


@struct.dataclass
class Read:
    """The target's results on texts [B, L], for any draft."""

    begun: Started
    logits: Logits  # [B, L, V] for each token, given those before it.
    hidden: dict[str, Array]  # The states [B, L, D] of a layer, by its name.


@functools.partial(Program, static=1)
def reading(
    models: Models, params: Params, source: Inputs, tokens: Tokens, layers: tuple[str, ...]
) -> Read:
    """Reads tokens [B, L] after source [B, S] with the target in one pass.

    It is a separate program, which all drafts that read the same layers share.
    """
    begun, scored = teacher_forced.score(models.target, params.target, source, tokens, layers)
    return Read(begun, scored.logits, scored.hidden)


@functools.partial(Program, static=1)
def acceptances(
    models: Models,
    params: Params,
    source: Inputs,
    tokens: Tokens,
    read: Read,
    sampling: Sampling,
    rule: Rule,
    vocab_size: int,
) -> Array:
    """Beta [B, L] at each of tokens [B, L], which the draft reads one by one, given `read`."""
    draft = models.draft
    assert draft is not None, "an acceptance rate needs a draft"
    # q does not depend on the random number that a guess is drawn with.
    uniforms = jnp.zeros((len(tokens), 1))

    def beta(state: State, last: Rows, row: Array) -> tuple[Proposal, Array]:
        proposal = draft.propose(params.draft, state, last, uniforms, sampling, vocab_size)
        q = proposal.probabilities(vocab_size)[:, 0]
        chance = rule.acceptance(row, q, sampling)
        return proposal, jnp.where(fault_of(proposal, uniforms, vocab_size) > 0, jnp.nan, chance)

    return at_each(models, params, source, tokens, read, beta, read.logits[..., :vocab_size])


def at_each(
    models: Models,
    params: Params,
    source: Inputs,
    tokens: Tokens,
    read: Read,
    look: Callable[[State, Rows, Any], tuple[Proposal, Array]],
    per_token: Any,
    room: int = 2,
    rows: Rows | None = None,
) -> Array:
    """The results [B, L] of `look` at each of tokens [B, L], which the draft reads one by one.

    `look` takes the draft's state, the token before [B], and the values of `per_token` [B, L, ...]
    at the token; it returns a proposal, of which no guess is accepted, and the result. `room` is
    the space for a proposal in caches, at least 2, because a draft may read a chunk of two. If
    texts share sources, these are [U, S], as in `read.begun`, and `rows` [B] tells each text's.
    """
    draft = models.draft
    assert draft is not None, "only a draft makes guesses"
    batch, length = tokens.shape
    none_accepted = jnp.zeros(batch, jnp.int32)

    def at(state: State, at_token: tuple[Array, Any, dict[str, Array]]) -> tuple[State, Array]:
        last, here, hidden = at_token
        proposal, result = look(state, last, here)
        # The guess is never accepted, so its hidden states may have any value.
        hidden = {name: jnp.stack([x, x], axis=1) for name, x in hidden.items()}
        return draft.commit(params.draft, proposal, none_accepted, hidden), result

    state = draft.start(params.draft, source, length + room, read.begun)
    first = models.target.first(source)
    if rows is not None:
        state, first = jax.tree.map(lambda x: x[rows], (state, first))
    fed = teacher_forced.previous(tokens, first)
    along = jax.tree.map(lambda x: x.swapaxes(0, 1), (fed, per_token, read.hidden))
    return lax.scan(at, state, along)[1].T
