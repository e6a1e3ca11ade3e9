"""Decodes many texts in one batch: a row whose text has ended begins the next one."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative import checks
from speculative.decoding import loop
from speculative.decoding.loop import Models, Params, Progress
from speculative.decoding.programs import Program
from speculative.decoding.settings import Decoding, Output
from speculative.drafts.base import Draft
from speculative.models.interface import Model
from speculative.sampling import Kinds
from speculative.types import Inputs


class Request(NamedTuple):
    """A text to decode: its source or prompt [1, S], settings and the keys of its random numbers.

    A source that neighbouring requests share is read once.
    """

    source: Inputs
    config: Decoding
    seed: int = 0
    example: int = 0
    stop: tuple[str, ...] = ()  # Strings that end the text; they are not shown.
    show_special: bool = False  # Whether the text shows special tokens.

    @property
    def draws(self) -> Array:
        """The text's random numbers, from `Decoding.draws`."""
        return self.config.draws(self.seed, np.array([self.example]))

    @property
    def alone(self) -> "Request":
        """The same text, decoded by the target alone."""
        return self._replace(config=self.config.alone)

    def sample(self, number: int) -> "Request":
        """The request of sample `number`, up to `checks.MAX_SAMPLES`; this request is sample 0."""
        example = checks.whole("example", self.example + number * 2**20, 0, 2**31)
        return self._replace(example=example)


@functools.partial(Program, donated=("progress", "draws"))
def run(
    models: Models,
    params: Params,
    progress: Progress,
    draws: Array,
    config: Decoding,
    enough: Array,
    most: Array,
) -> tuple[Progress, Array, Output]:
    """Steps until `enough` rows have ended or one has taken `most` steps; also gives the output."""
    before = progress.target_calls

    def runs(progress: Progress) -> Array:
        return (progress.finished.sum() < enough) & ((progress.target_calls - before).max() < most)

    progress = jax.lax.while_loop(
        runs, lambda progress: loop.step(models, params, progress, draws, config)[0], progress
    )
    return progress, draws, loop.output(progress, config)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def put_row(
    progress: Progress, draws: Array, row: int, one: Progress, own: Array
) -> tuple[Progress, Array]:
    """Replaces a row of a batch with that of a batch of 1, and its random numbers too.

    Raises:
        ValueError: inputs differ in width, or caches in size.
    """

    def put(whole: Array, entry: Array) -> Array:
        if entry.shape != (1, *whole.shape[1:]):
            raise ValueError(
                f"A row's state is {entry.shape}, that of a batch of {len(draws)} is "
                f"{whole.shape}; start it with inputs as wide and a cache as long as the batch's."
            )
        return jax.lax.dynamic_update_slice_in_dim(whole, entry, row, axis=0)

    return jax.tree.map(put, (progress, draws), (one, own))


@functools.partial(jax.jit, donate_argnums=0)
def _end(progress: Progress, row: int) -> Progress:
    return dataclasses.replace(progress, finished=progress.finished.at[row].set(True))


def generate(
    target: Model,
    draft: Draft | None,
    params: Params,
    requests: Iterable[tuple[int, Request]],
    kinds: Kinds,
    batch_size: int,
    ends: Callable[[int, list[int]], int] | None = None,
) -> Iterator[tuple[int, Output]]:
    """Decodes numbered texts in batches of `batch_size` and yields the output [1, ...] of each.

    An output is yielded when its text ends, which may be before the end of sequence: after every
    step, `ends` gets the text's number and its tokens so far, and returns how many of them make the
    text, or 0 if it has not ended. Tokens and guesses beyond are not counted.

    Each text is read by itself and has its own random numbers, and rows do not interact. So outputs
    are those of `loop.generate` for each text, bit for bit where a position's result does not
    depend on the positions computed with it, as with the CPU kernels, and up to rounding elsewhere.
    All sources must have the same width, and all settings the same `Decoding.program` and no
    `kinds` of sampling but these; texts are taken as rows become free.
    """
    waiting = iter(requests)
    if (upcoming := next(waiting, None)) is None:
        return
    read, configs = upcoming[1].source, [upcoming[1].config] * batch_size
    models, params = loop.used(target, draft, params, configs[0].gamma)
    config = Decoding.together(configs, kinds)
    (size,) = config.cache_lengths()
    progress, draws = _empty(models, params, read, config, size, batch_size)
    of_one = Decoding.together(configs[:1], kinds)  # One program begins texts for all batch sizes.
    one = loop.begin(models, params, read, of_one, size)
    numbers: list[int | None] = [None] * batch_size
    of_row = config.gamma, 1 + config.ranks
    before = np.zeros(batch_size, int), np.zeros((batch_size, *of_row), int)
    while upcoming or numbers.count(None) < batch_size:
        for row in range(batch_size):
            if numbers[row] is None and upcoming:
                numbers[row], request = upcoming
                upcoming = next(waiting, None)
                if request.source is not read:
                    read = request.source
                    one = loop.begin(models, params, read, of_one, size)
                progress, draws = put_row(progress, draws, row, one, request.draws)
                for counts in before:
                    counts[row] = 0
                if request.config != configs[row]:
                    configs[row] = request.config
                    config = Decoding.together(configs, kinds)
        enough = numbers.count(None) + 1 if upcoming else batch_size
        most = 2**31 - 1 if ends is None else 1
        progress, draws, output = run(models, params, progress, draws, config, enough, most)
        finished, output = jax.device_get((progress.finished, output))
        leaves, tree = jax.tree.flatten(output)
        for row, number in enumerate(numbers):
            if number is None:
                continue
            tokens = output.tokens[row, : output.lengths[row]]
            end = ends(number, tokens.tolist()) if ends else 0
            if not (finished[row] or end):
                continue
            if not finished[row]:
                progress = _end(progress, row)
            one_row = jax.tree.unflatten(tree, [rows[row : row + 1] for rows in leaves])
            yield number, _until(one_row, end, *(x[row] for x in before)) if end else one_row
            numbers[row] = None
        before = np.array(output.lengths), np.array(output.by_position)


def _until(output: Output, end: int, length: int, by_position: np.ndarray) -> Output:
    """Cuts an output [1, ...] in its last step, at `end`; the counts are from before that step."""
    counted = np.arange(len(by_position))[:, None] < end - length
    of_step = np.where(counted, output.by_position - by_position, 0)
    lengths = np.full_like(output.lengths, end)
    return dataclasses.replace(output, lengths=lengths, by_position=by_position + of_step)


def _empty(
    models: Models, params: Params, source: Array, config: Decoding, size: int, batch_size: int
) -> tuple[Progress, Array]:
    """The progress and the random numbers for rows without a text."""
    inputs = jax.ShapeDtypeStruct((batch_size, *source.shape[1:]), source.dtype)
    start = functools.partial(loop.start, models, config=config, cache_length=size)
    draws = config.draws_struct(batch_size)
    leaves, tree = jax.tree.flatten((jax.eval_shape(start, params, inputs), draws))
    progress, draws = jax.tree.unflatten(tree, _zeros(tuple(leaves)))
    return dataclasses.replace(progress, finished=np.ones(batch_size, bool)), draws


@functools.partial(jax.jit, static_argnums=0)
def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[Array]:
    """Zeros of all these shapes, made by one program."""
    return [jnp.zeros(x.shape, x.dtype) for x in shapes]
