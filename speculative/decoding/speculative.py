"""Speculative decoding on the device: draft gamma, verify at once, accept, correct, rewind.

One step is one function (Algorithm 1). `generate` runs it in a device loop, one dispatch a
sequence; `stream` dispatches the same step from the host and reads each step's tokens while
the next one already runs. Rows of a batch advance raggedly: every length is per row.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.typing import ArrayLike

from speculative.decoding.settings import ACCEPT, CORRECT, DRAFT, Decoding, Output
from speculative.drafts.base import Draft, require_shapes
from speculative.models.cache import grow, read_rows, write_rows
from speculative.sampling import argmax, first, standardise
from speculative.types import PAD_ID, Flags, Inputs, Logits, PyTree, Rows, Tokens
from speculative.verification import leading, lenient_best, verify, verify_greedy


class Model(Protocol):
    """The verbs by which decoding knows a model; hashable."""

    def first(self, inputs: Inputs) -> Rows:
        """The token that is fed first: a start token, or the last of a prompt."""
        ...

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

    The target's cache holds the first token and all emitted tokens but the newest, which is
    `last`; that is `lengths` tokens, beside a prompt. `counts` [B, gamma, 2] are what `Adaptive`
    keeps.
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
    counts: Array


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
    models: Models,
    params: Params,
    inputs: Inputs,
    config: Decoding,
    cache_length: int,
    counts: Array | None = None,
) -> Progress:
    """Both models' states before the first token, for inputs [B, S]; counts as in `generate`."""
    batch = inputs.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    target, draft = models.target.start(params.target, inputs, cache_length), ()
    if models.draft:
        draft = models.draft.start(params.draft, inputs, cache_length, target)
    return Progress(
        target=target,
        draft=draft,
        last=models.target.first(inputs),
        tokens=jnp.full((batch, config.capacity), PAD_ID, jnp.int32),
        lengths=zeros,
        finished=jnp.zeros(batch, bool),
        target_calls=zeros,
        tested=zeros,
        accepted=zeros,
        finite=jnp.ones(batch, bool),
        counts=jnp.zeros((batch, config.gamma, 2)) if counts is None else counts,
    )


def step(
    models: Models,
    params: Params,
    progress: Progress,
    draws: Array,
    config: Decoding,
    gamma: int | None = None,
) -> tuple[Progress, Step]:
    """One step of Algorithm 1 for every row; draws is [B, capacity, 3], gamma as configured."""
    gamma = config.gamma if gamma is None else gamma
    sampling, vocab_size = config.sampling, config.vocab_size
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
        require_shapes(proposal, chunk.shape[0], gamma, vocab_size)
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
        if config.lenience < 1:
            best = lenient_best(guesses, best, logits, config.lenience)
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
            guesses, p, q, uniforms[:, :gamma, ACCEPT], uniforms[..., CORRECT], config.lenience
        )
    if config.simulated_alpha is not None:
        accepted = leading(uniforms[:, :gamma, ACCEPT] < config.simulated_alpha)

    places = jnp.arange(gamma + 1)
    block = jnp.where(
        places < accepted[:, None],
        jnp.pad(guesses, ((0, 0), (0, 1))),
        next_token[:, None],
    )
    end = first(block == config.eos_id)
    count = jnp.minimum(jnp.minimum(end, accepted) + 1, config.max_length - progress.lengths)
    count = jnp.where(progress.finished, 0, count)
    lengths = progress.lengths + count
    live = ~progress.finished
    finished = progress.finished | (end <= accepted) | (lengths >= config.max_length)
    finite = progress.finite & (jnp.isfinite(peak).all(axis=1) | progress.finished)
    tested = jnp.minimum(jnp.minimum(accepted + 1, gamma), count)
    stood = jnp.minimum(accepted, count)
    counts = progress.counts
    if config.adaptive:
        counts = config.adaptive.count(counts, tested, stood)
    progress = Progress(
        target=models.target.rewind(target, lengths),
        draft=models.draft.commit(proposal, accepted) if models.draft and proposal else (),
        last=next_token,
        tokens=write_rows(progress.tokens, block, progress.lengths, axis=1),
        lengths=lengths,
        finished=finished,
        target_calls=progress.target_calls + live,
        tested=progress.tested + tested,
        accepted=progress.accepted + stood,
        finite=finite,
        counts=counts,
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


def _steps(
    models: Models,
    params: Params,
    draws: Array,
    config: Decoding,
    costs: Array,
    runs: Callable[[Progress], Array],
) -> Callable[[Progress], Progress]:
    """What a device loop repeats: a step or, where gamma is picked, a stride of steps with it.

    A loop for each gamma, of which one runs, for a branch for each would copy the caches.
    """
    adaptive = config.adaptive
    if adaptive is None:
        return lambda progress: step(models, params, progress, draws, config)[0]

    def stride(progress: Progress) -> Progress:
        pick = adaptive.choose(progress.counts, costs, ~progress.finished)
        until = progress.target_calls.max() + adaptive.stride
        for place, gamma in enumerate(adaptive.gammas):

            def goes_on(progress: Progress, place: int = place) -> Array:
                return runs(progress) & (pick == place) & (progress.target_calls.max() < until)

            def body(progress: Progress, gamma: int = gamma) -> Progress:
                return step(models, params, progress, draws, config, gamma)[0]

            progress = lax.while_loop(goes_on, body, progress)
        return progress

    return stride


@functools.partial(jax.jit, static_argnames=("models", "config"))
def _generate(
    models: Models,
    params: Params,
    inputs: Array,
    draws: Array,
    config: Decoding,
    counts: Array | None = None,
    costs: ArrayLike | tuple[()] = (),
) -> Output:
    def finish(progress: Progress, size: int, *larger: int) -> Output:
        """Decodes in caches of this size, then in larger ones what has no room in them."""

        def runs(progress: Progress) -> Array:
            live = ~progress.finished
            return jnp.any(live) & jnp.all(progress.lengths * live + config.room <= size)

        def go_on(progress: Progress) -> Output:
            progress = _grown(models, params, inputs, progress, config, larger[0])
            return finish(progress, *larger)

        steps = _steps(models, params, draws, config, jnp.asarray(costs), runs)
        progress = lax.while_loop(runs, steps, progress)
        if not larger:
            return _output(progress, config)
        # Each way ends with the output alone: caches that left it would be copied.
        over = progress.finished.all()
        return lax.cond(over, functools.partial(_output, config=config), go_on, progress)

    sizes = config.cache_lengths()
    return finish(start(models, params, inputs, config, sizes[0], counts), *sizes)


def _output(progress: Progress, config: Decoding) -> Output:
    kept = jnp.arange(config.max_length) < progress.lengths[:, None]
    return Output(
        tokens=jnp.where(kept, progress.tokens[:, : config.max_length], PAD_ID),
        lengths=progress.lengths,
        target_calls=progress.target_calls,
        tested=progress.tested,
        accepted=progress.accepted,
        finite=progress.finite,
        counts=progress.counts,
    )


def generate(
    target: Model,
    draft: Draft,
    params: Params,
    inputs: Inputs,
    draws: Array,
    config: Decoding,
    counts: Array | None = None,
) -> Output:
    """Decodes a batch speculatively, in one dispatch.

    The outputs are distributed as the target's own (Leviathan et al., A.1); at temperature 0
    they are its greedy ones. Not so of lenient decoding (A.5).

    Args:
        target: the model that is sampled from.
        draft: what guesses for it.
        params: of both.
        inputs: [B, S] source tokens, 0 is padding.
        draws: [B, config.capacity, 3] from `random_draws`.
        config: gamma, sampling, lengths.
        counts: [B, gamma, 2], `Output.counts` of earlier texts, by which an adaptive gamma begins.
    """
    check_draws(draws, config)
    costs: ArrayLike | tuple[()] = ()
    if config.adaptive:
        costs = np.array(config.adaptive.costs, np.float32)
        shape = (len(inputs), config.gamma, 2)
        counts = jnp.zeros(shape) if counts is None else counts
        if counts.shape != shape:
            raise ValueError(f"counts must be {list(shape)}, not {list(counts.shape)}.")
    models, inputs = Models(target, draft), jnp.asarray(inputs)
    return _generate(models, params, inputs, draws, config, counts, costs)


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
    if config.adaptive:
        raise ValueError("Streaming decodes with a fixed gamma; set Decoding.adaptive to None.")
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
