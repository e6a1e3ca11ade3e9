"""Speculative decoding on the device: draft gamma, verify at once, accept, correct, rewind.

One step is one function (Algorithm 1). `generate` runs it in a device loop, one dispatch a
sequence; `stream` dispatches the same step from the host and reads each step's tokens while
the next one already runs. Rows of a batch advance raggedly: every length is per row.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from speculative.decoding.settings import ACCEPT, CORRECT, DRAFT, Decoding, Output
from speculative.drafts.base import Draft
from speculative.models.cache import grow, read_rows, write_rows
from speculative.sampling import argmax, standardise
from speculative.types import PAD_ID, Flags, Inputs, Logits, PyTree, Rows, Tokens
from speculative.verification import leading, verify, verify_greedy


class Model(Protocol):
    """The three verbs by which decoding knows a model; hashable."""

    def start(self, params: PyTree, inputs: Inputs, cache_length: int) -> Any:
        """The state before the first token."""
        ...

    def extend(self, params: PyTree, state: Any, tokens: Tokens) -> tuple[Logits, Any]:
        """Appends a chunk [B, L]; logits [B, L, V]."""
        ...

    def rewind(self, state: Any, lengths: Rows) -> Any:
        """Forgets what lies beyond lengths [B]."""
        ...


class Models(NamedTuple):
    """Target and draft; a static argument. The draft is None for autoregressive decoding."""

    target: Model
    draft: Draft | None


class Params(NamedTuple):
    """Parameters of target and draft."""

    target: PyTree
    draft: PyTree = ()


@struct.dataclass
class Progress:
    """A generation under way.

    The target's cache holds the start token and all emitted tokens but the newest, which is
    `last`; that is `lengths` tokens.
    """

    target: Any
    draft: Any
    last: Rows
    tokens: Array
    lengths: Rows
    finished: Flags
    target_calls: Rows
    tested: Rows
    accepted: Rows
    finite: Flags


@struct.dataclass
class Step:
    """What one step did, for streaming and traces.

    Attributes:
        tokens: [B, gamma + 1] the block; the first `count` were emitted.
        count: [B] tokens emitted, 0 for a row that had finished.
        guesses: [B, gamma] what the draft proposed.
        accepted: [B] how many of those stand.
        finished: [B] whether the row is complete.
        finite: [B] False where the target's logits were not finite.
    """

    tokens: Array
    count: Rows
    guesses: Array
    accepted: Rows
    finished: Flags
    finite: Flags


def start(
    models: Models, params: Params, inputs: Inputs, config: Decoding, cache_length: int
) -> Progress:
    """Encodes the sources [B, S] for both models."""
    batch = inputs.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    target, draft = models.target.start(params.target, inputs, cache_length), ()
    if models.draft:
        draft = models.draft.start(params.draft, inputs, cache_length, target)
    return Progress(
        target=target,
        draft=draft,
        last=jnp.full(batch, PAD_ID, jnp.int32),
        tokens=jnp.full((batch, config.capacity), PAD_ID, jnp.int32),
        lengths=zeros,
        finished=jnp.zeros(batch, bool),
        target_calls=zeros,
        tested=zeros,
        accepted=zeros,
        finite=jnp.ones(batch, bool),
    )


def step(
    models: Models, params: Params, progress: Progress, draws: Array, config: Decoding
) -> tuple[Progress, Step]:
    """One step of Algorithm 1 for every row; draws is [B, capacity, 3]."""
    gamma, sampling, vocab_size = config.gamma, config.sampling, config.vocab_size
    uniforms = read_rows(draws, progress.lengths, gamma + 1)
    chunk = progress.last[:, None]
    guesses = chunk[:, :0]
    proposal = None
    if gamma:
        assert models.draft is not None, "gamma > 0 needs a draft"
        proposal = models.draft.propose(
            params.draft,
            progress.draft,
            progress.last,
            uniforms[:, :gamma, DRAFT],
            sampling,
            vocab_size,
        )
        guesses = proposal.guesses
        chunk = jnp.concatenate([chunk, guesses], axis=1)

    logits, target = models.target.extend(params.target, progress.target, chunk)
    if logits.shape[-1] < vocab_size:
        raise ValueError(
            f"Decoding.vocab_size is {vocab_size}, but the target has {logits.shape[-1]} tokens."
        )
    logits = logits[..., :vocab_size]
    if sampling.greedy:
        best = argmax(logits)
        peak = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
        accepted, next_token = verify_greedy(guesses, best)
    else:
        peak = jnp.max(logits, axis=-1)
        p = standardise(logits, sampling)
        if proposal is None:
            q = p[:, :0]
        elif proposal.q is None:
            q = jax.nn.one_hot(guesses, vocab_size)
        else:
            q = proposal.q
        accepted, next_token = verify(
            guesses, p, q, uniforms[:, :gamma, ACCEPT], uniforms[..., CORRECT]
        )
    if config.simulated_alpha is not None:
        accepted = leading(uniforms[:, :gamma, ACCEPT] < config.simulated_alpha)

    places = jnp.arange(gamma + 1)
    block = jnp.where(
        places < accepted[:, None],
        jnp.pad(guesses, ((0, 0), (0, 1))),
        next_token[:, None],
    )
    ends = (block == config.eos_id) & (places <= accepted[:, None])
    count = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), accepted) + 1
    count = jnp.minimum(count, config.max_length - progress.lengths)
    count = jnp.where(progress.finished, 0, count).astype(jnp.int32)
    lengths = progress.lengths + count
    live = ~progress.finished
    finished = progress.finished | ends.any(axis=1) | (lengths >= config.max_length)
    finite = progress.finite & (jnp.isfinite(peak).all(axis=1) | progress.finished)
    progress = Progress(
        target=models.target.rewind(target, lengths),
        draft=models.draft.commit(proposal, accepted) if models.draft and proposal else (),
        last=next_token,
        tokens=write_rows(progress.tokens, block, progress.lengths, axis=1),
        lengths=lengths,
        finished=finished,
        target_calls=progress.target_calls + live,
        tested=progress.tested + jnp.minimum(jnp.minimum(accepted + 1, gamma), count),
        accepted=progress.accepted + jnp.minimum(accepted, count),
        finite=finite,
    )
    return progress, Step(block, count, guesses, accepted, finished, finite)


def check_draws(draws: Array, config: Decoding) -> None:
    """Raises ValueError unless every position that a generation may touch has its numbers.

    Beyond the last of them a read would slide back and use numbers twice: not exact any more.
    """
    if draws.shape[1] < config.capacity:
        raise ValueError(
            f"There are random numbers for {draws.shape[1]} positions, but max_length = "
            f"{config.max_length} with gamma = {config.gamma} needs {config.capacity}; draw "
            "Decoding.capacity of them."
        )


def _grown(
    models: Models, params: Params, inputs: Array, progress: Progress, config: Decoding, size: int
) -> Progress:
    """The same progress with caches of another size, whatever the models keep in their states."""
    larger = jax.eval_shape(lambda p, x: start(models, p, x, config, size), params, inputs)
    return grow(progress, larger)


@functools.partial(jax.jit, static_argnames=("models", "config"))
def _generate(
    models: Models, params: Params, inputs: Array, draws: Array, config: Decoding
) -> Output:
    sizes = config.cache_lengths()
    progress = start(models, params, inputs, config, sizes[0])
    for size in sizes:

        def runs(progress: Progress, size: int = size) -> Array:
            live = ~progress.finished
            return jnp.any(live) & jnp.all(progress.lengths * live + config.room <= size)

        def body(progress: Progress) -> Progress:
            return step(models, params, progress, draws, config)[0]

        progress = _grown(models, params, inputs, progress, config, size)
        progress = lax.while_loop(runs, body, progress)
    kept = jnp.arange(config.max_length) < progress.lengths[:, None]
    return Output(
        tokens=jnp.where(kept, progress.tokens[:, : config.max_length], PAD_ID),
        lengths=progress.lengths,
        target_calls=progress.target_calls,
        tested=progress.tested,
        accepted=progress.accepted,
        finite=progress.finite,
    )


def generate(
    target: Model,
    draft: Draft,
    params: Params,
    inputs: Inputs,
    draws: Array,
    config: Decoding,
) -> Output:
    """Decodes a batch speculatively, in one dispatch.

    The outputs are distributed as the target's own (Leviathan et al., A.1); at temperature 0
    they are its greedy ones.

    Args:
        target: the model that is sampled from.
        draft: what guesses for it.
        params: of both.
        inputs: [B, S] source tokens, 0 is padding.
        draws: [B, config.capacity, 3] from `random_draws`.
        config: gamma, sampling, lengths.
    """
    check_draws(draws, config)
    return _generate(Models(target, draft), params, jnp.asarray(inputs), draws, config)


@functools.partial(jax.jit, static_argnames=("models", "config", "size"))
def _start(models: Models, params: Params, inputs: Array, config: Decoding, size: int) -> Progress:
    return start(models, params, inputs, config, size)


@functools.partial(jax.jit, static_argnames=("models", "config"), donate_argnames="progress")
def _step(
    models: Models, params: Params, progress: Progress, draws: Array, config: Decoding
) -> tuple[Progress, Step]:
    return step(models, params, progress, draws, config)


@functools.partial(jax.jit, static_argnames=("models", "config", "size"))
def _grow(
    models: Models, params: Params, inputs: Array, progress: Progress, config: Decoding, size: int
) -> Progress:
    return _grown(models, params, inputs, progress, config, size)


def stream(
    target: Model,
    draft: Draft | None,
    params: Params,
    inputs: Inputs,
    draws: Array,
    config: Decoding,
) -> Iterator[Step]:
    """Decodes from the host, a step at a time, in NumPy arrays; `generate`'s very tokens.

    Step i is handed out while step i + 1 runs.
    """
    check_draws(draws, config)
    models = Models(target, draft)
    inputs = jnp.asarray(inputs)
    size, *larger = config.cache_lengths()
    progress = _start(models, params, inputs, config, size)
    longest, running = 0, None
    while True:
        # The running step may still add a whole block to what has been read.
        if longest + config.room + (config.gamma + 1) > size and larger:
            size, *larger = larger
            progress = _grow(models, params, inputs, progress, config, size)
        progress, dispatched = _step(models, params, progress, draws, config)
        if running is not None:
            done: Step = jax.tree.map(np.asarray, running)
            longest += int(done.count.max())
            yield done
            if done.finished.all():
                return
        running = dispatched
