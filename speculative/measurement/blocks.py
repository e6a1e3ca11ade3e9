"""The expected tokens of a step, from blocks of guesses on the target's own text.

If a rule verifies the guesses of a step together, an acceptance rate (`alpha`) does not predict
them. Here the draft proposes gamma guesses at every token of the text, as it does in decoding, and
the target scores them. Only the rule's own random numbers are then left to chance, and
`Rule.chances` sums over them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from speculative.decoding import Decoding, Params, Rule
from speculative.decoding.loop import Models
from speculative.grouping import filled
from speculative.measurement import teacher_forced
from speculative.models.interface import Chunk
from speculative.pair import Pair
from speculative.sampling import Sampling, first
from speculative.types import Inputs, Tokens


def tokens_on_target_text(
    pair: Pair,
    source: Array,
    tokens: Sequence[int],
    config: Decoding,
    gammas: Sequence[int],
    rules: Sequence[Rule],
    seed: int = 0,
) -> NDArray[np.float64]:
    """The expected tokens [length, gammas, rules] of a step that begins at each token of an output.

    One draw of guesses, from numbers of `seed`, serves all gammas and rules. The source is [1, S];
    the output, with its end of sequence, is padded to `max_length` tokens, so that one program is
    compiled.
    """
    row = filled([tokens], config.max_length)
    uniforms = jax.random.uniform(jax.random.key(seed), (config.max_length, 1, max(gammas)))
    inputs = Models(pair.target, pair.draft), pair.params, source, row, uniforms
    how = config.sampling, config.vocab_size, config.eos_ids
    yields = step_tokens(*inputs, *how, tuple(gammas), tuple(rules))
    # Float32 sums may lie outside the range of a step's tokens.
    return np.clip(np.asarray(yields, np.float64)[0, : len(tokens)], 1, np.add(gammas, 1)[:, None])


@functools.partial(jax.jit, static_argnames=("models", "vocab_size", "eos_ids", "gammas"))
def step_tokens(
    models: Models,
    params: Params,
    source: Inputs,
    tokens: Tokens,
    uniforms: Array,
    sampling: Sampling,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    gammas: tuple[int, ...],
    rules: tuple[Rule, ...],
) -> Array:
    """The expected tokens [B, L, gammas, rules] at tokens [B, L]; `uniforms` are [L, B, G]."""
    target, draft = models
    assert draft is not None, "only a draft makes guesses"
    batch, length = tokens.shape
    layers, room = draft.layers, length + uniforms.shape[2] + 2
    begun = target.start(params.target, source, room, layers=layers)
    state = draft.start(params.draft, source, room, begun)
    none = jnp.zeros(batch, jnp.int32)

    def at(carried: tuple[Any, Any], inputs: tuple[Array, Array, Array]) -> Any:
        (own, drafting), (last, uniforms, number) = carried, inputs
        proposal = draft.propose(params.draft, drafting, last, uniforms, sampling, vocab_size)
        chunk = jnp.concatenate([last[:, None], proposal.guesses], axis=1)
        logits, own, hidden = target.extend(params.target, own, Chunk(chunk), layers=layers)
        logits = logits[..., :vocab_size]
        end = first(jnp.isin(proposal.guesses, jnp.array(eos_ids)))[:, None]

        def expected(gamma: int, rule: Rule) -> Array:
            """1 plus the guesses accepted before an end of sequence, which nothing follows."""
            q = None if proposal.q is None else proposal.q[:, :gamma]
            block = proposal.guesses[:, :gamma], logits[:, : gamma + 1], q
            chances = rule.chances(*block, sampling)
            return 1 + (chances * jnp.minimum(jnp.arange(gamma + 1), end)).sum(axis=1)

        yields = jnp.stack(
            [jnp.stack([expected(gamma, rule) for rule in rules], -1) for gamma in gammas], axis=1
        )
        # Only `last` in the chunk is text: the target's own next token replaces the guesses.
        own = target.rewind(own, none + number + 1)
        return (own, draft.commit(params.draft, proposal, none, hidden)), yields

    fed = teacher_forced.previous(tokens, target.first(source)).swapaxes(0, 1)
    along = fed, uniforms, jnp.arange(length)
    return lax.scan(at, (begun.state, state), along)[1].swapaxes(0, 1)
