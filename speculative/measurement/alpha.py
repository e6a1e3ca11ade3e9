"""The acceptance rate alpha, measured as the paper does (Definition 3.1, section 4.2)."""

import functools
from collections.abc import Sequence
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
from speculative.drafts.base import fault_of
from speculative.grouping import batches, filled
from speculative.measurement import teacher_forced
from speculative.models.interface import Started
from speculative.pair import Pair
from speculative.sampling import Sampling
from speculative.types import Inputs, Logits, Tokens


def alpha_on_target_text(
    pair: Pair,
    sources: Sequence[Array],
    tokens: Sequence[Sequence[int]],
    config: Decoding,
    batch_size: int = 1,
) -> list[NDArray[np.float32]]:
    """Beta [length], the acceptance by `Rule.acceptance`, at every token of the target's outputs.

    Alpha is their mean over all tokens. Without random guesses and rejections its variance is
    lower than that of the share of guesses that decoding accepts.

    Sources are [1, S]. Outputs, with their end of sequence, are padded to `max_length` tokens, so
    that one program is compiled, and up to `batch_size` are scored together. Raises ValueError if
    the probabilities of target or draft are not finite.
    """
    alone = Models(pair.target, None), Params(pair.params.target)
    given = Models(pair.target, pair.draft), pair.params
    layers, how = pair.draft.layers, (config.sampling, config.rule, config.vocab_size)
    betas = [np.zeros(0, np.float32)] * len(sources)
    for chosen, places in batches(range(len(sources)), lambda i: sources[i].shape[1], batch_size):
        source = jnp.concatenate([sources[place] for place in places])
        rows = filled([tokens[place] for place in places], config.max_length)
        read = reading(*alone, source, rows, layers)
        found = acceptances(*given, source, rows, read, *how)
        for place, beta in zip(chosen, np.asarray(found), strict=False):
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
    """What the target says of texts [B, L], for any draft."""

    begun: Started
    logits: Logits  # [B, L, V] of each token, given those before it.
    hidden: dict[str, Array]  # By the name of a layer, its states [B, L, D].


@functools.partial(Program, static=1)
def reading(
    models: Models, params: Params, source: Inputs, tokens: Tokens, layers: tuple[str, ...]
) -> Read:
    """Reads tokens [B, L] after source [B, S] by the target in one pass.

    It is a program of its own, which all drafts that read the same layers share.
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
    """Beta [B, L] at each of tokens [B, L], as `read`, which the draft reads one by one."""
    draft = models.draft
    assert draft is not None, "an acceptance rate needs a draft"
    batch, length = tokens.shape
    none_accepted = jnp.zeros(batch, jnp.int32)
    # q does not depend on the random number that a guess is drawn with.
    uniforms = jnp.zeros((batch, 1))

    def at(state: Any, at_token: tuple[Array, Array, dict[str, Array]]) -> tuple[Any, Array]:
        last, row, hidden = at_token
        proposal = draft.propose(params.draft, state, last, uniforms, sampling, vocab_size)
        q = jax.nn.one_hot(proposal.guesses, vocab_size) if proposal.q is None else proposal.q
        beta = rule.acceptance(row, q[:, 0], sampling)
        beta = jnp.where(fault_of(proposal, uniforms, vocab_size) > 0, jnp.nan, beta)
        # The guess is never accepted, so that its hidden states may have any value.
        hidden = {name: jnp.stack([x, x], axis=1) for name, x in hidden.items()}
        return draft.commit(params.draft, proposal, none_accepted, hidden), beta

    # Two more positions, because a draft may read a chunk of two.
    state = draft.start(params.draft, source, length + 2, read.begun)
    fed = teacher_forced.previous(tokens, models.target.first(source))
    along = fed, read.logits[..., :vocab_size], read.hidden
    along = jax.tree.map(lambda x: x.swapaxes(0, 1), along)
    return lax.scan(at, state, along)[1].T
