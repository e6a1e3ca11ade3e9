"""Speculative decoding on the device: `generate` in one dispatch, `stream` step by step.

Both run the same `step`, which is Algorithm 1; without guesses it is an autoregressive step. Rows
of a batch advance raggedly: every length is per row.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from speculative.decoding.programs import Program
from speculative.decoding.settings import Decoding, Output
from speculative.drafts.base import Draft, Proposal, fault_of, require_shapes
from speculative.models.interface import Model, Started
from speculative.processors import History
from speculative.ragged import resized, write_rows
from speculative.sampling import first, greatest, log_probabilities
from speculative.tree import Growth
from speculative.types import PAD_ID, PADDING, Flags, Inputs, PyTree, Rows, State

PROPOSING = "propose"  # Names the draft's part of a step in profiles and compiled programs.


class Models(NamedTuple):
    """Target and draft, a static argument; the draft is None for autoregressive decoding."""

    target: Model
    draft: Draft | None


class Params(NamedTuple):
    """Parameters of target and draft."""

    target: PyTree
    draft: PyTree = ()


@struct.dataclass
class Progress(Output):
    """An unfinished generation: its output so far, with tokens [B, capacity], and its states."""

    target: State  # Its cache holds the whole text except the newest token.
    draft: State
    last: Rows  # The newest token.
    finished: Flags


@struct.dataclass
class Step:
    """The result of one step with D = gamma guesses.

    In a tree, these are the guesses along the accepted path, followed by arbitrary ones.
    """

    tokens: Array  # [B, D + 1] the block; the first `count` were emitted.
    count: Rows  # Tokens emitted, 0 for a row that had already finished.
    guesses: Array  # [B, D] the draft's.
    accepted: Rows
    finished: Flags
    finite: Flags  # Whether the target's logits were finite.
    fault: Rows  # The proposal's fault, an index into `drafts.base.FAULTS`.
    drafted: Rows  # Guesses proposed, including those off the path.
    by_position: Array  # [B, D, 1 + R] the step's counts; see `Output`.


@dataclasses.dataclass
class Earlier:
    """The text streamed last and the target's state for it: the earlier turns of a chat."""

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    target: Started | None = None

    def taken(self, inputs: np.ndarray) -> tuple[Started | None, Array]:
        """Hands over the state, and how many first tokens a prompt [S] shares with the text."""
        count = min(len(self.tokens), int((inputs != PADDING).sum()) - 1)
        other = self.tokens[:count] != inputs[:count]
        known = int(other.argmax()) if other.any() else count
        begun, self.target, self.tokens = self.target, None, self.tokens[:0]
        return begun if known else None, jnp.int32(known)

    def keep(self, inputs: np.ndarray, progress: Progress, hidden: dict[str, Array]) -> None:
        """Stores the text read so far, or only the prompt, which is all that `hidden` covers."""
        prompt, written = inputs[inputs != PADDING], int(progress.lengths[0])
        emitted = [] if hidden else np.asarray(progress.tokens)[0, : max(written - 1, 0)]
        self.tokens = np.concatenate([prompt, emitted]).astype(np.int32)
        self.target = Started(progress.target, hidden)


def start(
    models: Models, params: Params, inputs: Inputs, config: Decoding, cache_length: int
) -> Progress:
    """The progress before the first token, for inputs [B, S]."""
    return _resumed(models, params, inputs, None, jnp.int32(0), config, cache_length)[0]


def _resumed(
    models: Models,
    params: Params,
    inputs: Inputs,
    begun: Started | None,
    known: Array,
    config: Decoding,
    cache_length: int,
) -> tuple[Progress, dict[str, Array]]:
    """Like `start`, but the target may have read the `known` first tokens of a prompt.

    Also gives the target's hidden states.
    """
    batch, draft = inputs.shape[0], models.draft
    layers, arguments = draft.layers if draft else (), (inputs, cache_length)
    if begun is None:
        target = models.target.start(params.target, *arguments, layers=layers)
    else:
        target = models.target.resume(params.target, begun, known, *arguments)
    zeros = jnp.zeros(batch, jnp.int32)
    progress = Progress(
        target=target.state,
        draft=draft.start(params.draft, inputs, cache_length, target) if draft else (),
        last=models.target.first(inputs),
        tokens=jnp.full((batch, config.capacity), PAD_ID, jnp.int32),
        lengths=zeros,
        finished=jnp.zeros(batch, bool),
        target_calls=zeros,
        drafted=zeros,
        by_position=jnp.zeros((batch, config.gamma, 1 + config.ranks), jnp.int32),
        finite=jnp.ones(batch, bool),
        fault=zeros,
        logprobs=jnp.zeros((batch, config.capacity if config.logprobs else 0)),
    )
    return progress, target.hidden


def propose(
    draft: Draft,
    params: PyTree,
    state: State,
    last: Rows,
    numbers: Array,
    config: Decoding,
    history: History | None,
) -> Proposal:
    """Proposes a step's guesses, a chain or a tree; for the arguments see `Draft.propose`."""
    arguments = params, state, last
    if config.growth is None:
        return draft.propose(*arguments, numbers, config.sampling, config.vocab_size, history)
    noise = None if config.sampling.greedy else numbers
    settings = config.sampling, config.vocab_size, config.growth
    return draft.grow(*arguments, noise, *settings, history)


def step(
    models: Models, params: Params, progress: Progress, draws: Array, config: Decoding
) -> tuple[Progress, Step]:
    """One step of Algorithm 1 for every row."""
    gamma, vocab_size, draft = config.gamma, config.vocab_size, models.draft
    numbers = config.step_draws(draws, progress.lengths)
    history = config.history(progress.tokens, progress.lengths)
    proposal, fault = Proposal(progress.tokens[:, :0], None, ()), progress.fault
    if draft:
        to_guess = jnp.asarray(config.rule.to_guess(numbers))
        with jax.named_scope(PROPOSING):
            arguments = params.draft, progress.draft, progress.last, to_guess
            proposal = propose(draft, *arguments, config, history)
        require_shapes(proposal, len(progress.last), config.guesses, vocab_size)
        of_step = jnp.where(progress.finished, 0, fault_of(proposal, to_guess, vocab_size))
        fault = jnp.where(fault > 0, fault, of_step)
    guesses, tree, layers = proposal.guesses, proposal.tree, draft.layers if draft else ()
    logits, target, hidden = models.target.extend(
        params.target, progress.target, proposal.chunk(progress.last), layers=layers
    )
    if logits.shape[-1] < vocab_size:
        raise ValueError(
            f"Decoding.vocab_size is {vocab_size}, but the target has {logits.shape[-1]} tokens."
        )
    logits = logits[..., :vocab_size]
    logits = history.process_block(logits, guesses, tree) if history else logits
    known = jnp.isfinite(greatest(logits, config.sampling))
    path, ranks = None, None
    if tree is None:
        arguments = guesses, logits, proposal.q, config.sampling, numbers
        accepted, next_token = config.rule.verify(*arguments)
        tested = jnp.minimum(accepted + 1, gamma)
    else:  # From here on the guesses are the chain along the path.
        arguments = guesses, logits, config.sampling, numbers
        path, accepted, next_token = config.rule.verify_tree(*arguments, tree)
        tested = tree.tested(path, accepted)
        proposal = proposal.along(path)
        guesses, known = proposal.guesses, jnp.take_along_axis(known, path, axis=1)
        ranks = jnp.take_along_axis(tree.ranks, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
        take = functools.partial(jnp.take_along_axis, indices=path[..., None], axis=1)
        hidden = jax.tree.map(take, hidden)
        logits = take(logits) if config.logprobs else logits

    proposed = jnp.arange(gamma + 1) < accepted[:, None]
    block = jnp.where(proposed, jnp.pad(guesses, ((0, 0), (0, 1))), next_token[:, None])
    end = first(config.ends(block))
    count = jnp.minimum(jnp.minimum(end, accepted) + 1, config.max_length - progress.lengths)
    count = jnp.where(progress.finished, 0, count)
    lengths = progress.lengths + count
    live = ~progress.finished
    finished = progress.finished | (end <= accepted) | (lengths >= config.max_length)
    # Only for emitted tokens: after a rejected guess, a processor may forbid every token.
    emitted = jnp.arange(gamma + 1) < count[:, None]
    finite = (known | ~emitted).all(axis=1)
    depths = jnp.arange(gamma)[:, None]
    tested, stood = (
        depths < jnp.minimum(each, count)[:, None, None] for each in (tested, accepted)
    )
    if ranks is not None:
        stood &= ranks[..., None] == jnp.arange(Growth.BRANCHES)
    by_position = jnp.concatenate([tested, stood], axis=-1)
    logprobs = progress.logprobs
    if config.logprobs:
        own = log_probabilities(logits, block, config.sampling)
        logprobs = write_rows(logprobs, own, progress.lengths, axis=1)
    if path is None:
        target = models.target.rewind(target, lengths)
    else:
        target = models.target.keep(target, config.guesses + 1, path, count)
    progress = dataclasses.replace(
        progress,
        target=target,
        draft=draft.commit(params.draft, proposal, accepted, hidden) if draft else (),
        last=next_token,
        tokens=write_rows(progress.tokens, block, progress.lengths, axis=1),
        lengths=lengths,
        finished=finished,
        target_calls=progress.target_calls + live,
        drafted=progress.drafted + live * config.guesses,
        by_position=progress.by_position + by_position,
        finite=progress.finite & finite,
        fault=fault,
        logprobs=logprobs,
    )
    results = block, count, guesses, accepted, finished, progress.finite, fault
    return progress, Step(*results, live * config.guesses, by_position.astype(jnp.int32))


def _grown(
    models: Models, params: Params, inputs: Array, progress: Progress, config: Decoding, size: int
) -> Progress:
    larger = jax.eval_shape(lambda p, x: start(models, p, x, config, size), params, inputs)
    return resized(progress, larger)


@Program
def decode(models: Models, params: Params, inputs: Array, draws: Array, config: Decoding) -> Output:
    """The compiled program behind `generate`."""

    def finish(progress: Progress, size: int, *larger: int) -> Output:
        """Decodes with caches of this size until a row fills them, then with larger ones."""

        def runs(progress: Progress) -> Array:
            live = ~progress.finished
            return jnp.any(live) & jnp.all(progress.lengths * live + config.room <= size)

        def go_on(progress: Progress) -> Output:
            progress = _grown(models, params, inputs, progress, config, larger[0])
            return finish(progress, *larger)

        progress = lax.while_loop(
            runs, lambda progress: step(models, params, progress, draws, config)[0], progress
        )
        if not larger:
            return output(progress, config)
        # Both branches return only the output: returned caches would be copied.
        over = progress.finished.all()
        return lax.cond(over, functools.partial(output, config=config), go_on, progress)

    sizes = config.cache_lengths()
    return finish(start(models, params, inputs, config, sizes[0]), *sizes)


def output(progress: Progress, config: Decoding) -> Output:
    """The output of a generation's rows so far, without the spare positions past the longest."""
    kept = jnp.arange(config.longest) < progress.lengths[:, None]
    tokens = jnp.where(kept, progress.tokens[:, : config.longest], PAD_ID)
    logprobs = progress.logprobs[:, : config.longest]
    fields = {field.name: getattr(progress, field.name) for field in dataclasses.fields(Output)}
    return Output(**fields | {"tokens": tokens, "logprobs": logprobs})


def used(target: Model, draft: Draft | None, params: Params, gamma: int) -> tuple[Models, Params]:
    """A generation's models and parameters; without guesses, only the target's."""
    if gamma == 0:
        return Models(target, None), Params(params.target)
    if draft is None:
        raise ValueError(f"gamma = {gamma} needs a draft; give one, or set gamma to 0.")
    return Models(target, draft), params


def generate(
    target: Model,
    draft: Draft | None,
    params: Params,
    inputs: Inputs,
    draws: Array,
    config: Decoding,
) -> Output:
    """Decodes inputs [B, S] in one dispatch, by the target alone if gamma is 0.

    With an exact rule the outputs have the target's distribution (Leviathan et al., A.1); at
    temperature 0 they are its greedy outputs. `draws` come from `Decoding.draws`.

    Raises:
        ValueError: draws do not have the shape that the settings need.
    """
    config.check_draws(draws, len(inputs))
    models, params = used(target, draft, params, config.gamma)
    return decode(models, params, inputs, draws, config)


begin = Program(start, static=1)
_resume = Program(_resumed, static=2)
one_step = Program(step, donated=("progress",))
_grow = Program(_grown, static=1)


def stream(
    target: Model,
    draft: Draft | None,
    params: Params,
    inputs: Inputs,
    draws: Array,
    config: Decoding,
    earlier: Earlier | None = None,
) -> Iterator[Step]:
    """Yields the steps of `generate` as NumPy arrays, step i while step i + 1 runs.

    If a single prompt begins like the text streamed `earlier`, the target reads only the rest;
    afterwards `earlier` holds this text. A draft reads the whole prompt.

    Raises:
        ValueError: draws do not have the shape that the settings need.
    """
    config.check_draws(draws, len(inputs))
    models, params = used(target, draft, params, config.gamma)
    inputs = jax.device_put(inputs)

    def steps() -> Iterator[Step]:
        size, *larger = config.cache_lengths()
        hidden = dict[str, Array]()
        if earlier is None:
            progress = begin(models, params, inputs, config, size)
        else:
            progress, hidden = _resume(
                models, params, inputs, *earlier.taken(np.asarray(inputs)[0]), config, size
            )
        longest, running = 0, None
        try:
            while True:
                # The running step may add a whole block that has not been read yet.
                if longest + config.room + (config.gamma + 1) > size and larger:
                    size, *larger = larger
                    progress = _grow(models, params, inputs, progress, config, size)
                progress, dispatched = one_step(models, params, progress, draws, config)
                if running is not None:
                    done: Step = jax.tree.map(np.asarray, running)
                    longest += int(done.count.max())
                    yield done
                    if done.finished.all():
                        return
                running = dispatched
        finally:
            if earlier is not None:
                earlier.keep(np.asarray(inputs)[0], progress, hidden)

    return steps()  # `stream` itself is not a generator, so it raises when called.
