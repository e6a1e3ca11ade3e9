"""Many texts in the rows of one batch: a row whose text has ended begins the next one.

What a text yields depends neither on its neighbours nor on when it begins: it is read alone, rows
do not meet, and its random numbers are its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from speculative.decoding import loop
from speculative.decoding.loop import Models, Params, Progress
from speculative.decoding.programs import Program
from speculative.decoding.settings import Decoding, Output
from speculative.drafts.base import Draft
from speculative.models.interface import Model
from speculative.sampling import Kinds
from speculative.types import Inputs

NO_LIMIT = 2**31 - 1  # Of steps.


class Text(NamedTuple):
    """What is to be decoded, and a number by which its output is known."""

    number: int
    inputs: Inputs  # [1, S]; of neighbouring texts that share them they are read once.
    draws: Array  # [1, ...] of `Decoding.draws`.
    config: Decoding


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
    """Steps until `enough` rows have ended, or a row has taken `most` more; and the output."""
    before = progress.target_calls

    def runs(progress: Progress) -> Array:
        more = (progress.target_calls - before).max() < most
        return (progress.finished.sum() < enough) & more

    def advance(progress: Progress) -> Progress:
        return loop.step(models, params, progress, draws, config)[0]

    progress = jax.lax.while_loop(runs, advance, progress)
    return progress, draws, loop.output(progress, config)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _put(
    progress: Progress, draws: Array, row: int, one: Progress, own: Array
) -> tuple[Progress, Array]:
    return loop.put_row(progress, row, one), draws.at[row].set(own[0])


@functools.partial(jax.jit, donate_argnums=0)
def _end(progress: Progress, row: int) -> Progress:
    return dataclasses.replace(progress, finished=progress.finished.at[row].set(True))


def generate(
    target: Model,
    draft: Draft | None,
    params: Params,
    texts: Iterable[Text],
    kinds: Kinds,
    batch_size: int,
    ends: Callable[[int, list[int]], bool] | None = None,
) -> Iterator[tuple[int, Output]]:
    """Decodes texts in batches of `batch_size` and gives the output [1, ...] of each as it ends.

    A text may end before its end of sequence: `ends` is asked after every step, with the text's
    number and its tokens so far.

    The outputs are those of `loop.generate` for each text alone: bit for bit where a position's
    result does not depend on the positions computed beside it, as with the kernels for CPU, and but
    for rounding elsewhere. Inputs are of one width, and settings of one `Decoding.program` with
    sampling of no other `kinds`; the texts are taken as rows become free.
    """
    waiting = iter(texts)
    upcoming = next(waiting, None)
    if upcoming is None:
        return
    models, params = loop.used(target, draft, params, upcoming.config.gamma)
    configs = [upcoming.config] * batch_size
    config = Decoding.together(configs, kinds)
    (size,) = config.cache_lengths()
    progress, draws = _empty(models, params, upcoming, config, size, batch_size)
    most = NO_LIMIT if ends is None else 1
    numbers: list[int | None] = [None] * batch_size
    read, one = None, None
    while True:
        for row in range(batch_size):
            if numbers[row] is None and upcoming is not None:
                if upcoming.inputs is not read:
                    read = upcoming.inputs
                    one = loop.begin(models, params, read, config, size)
                progress, draws = _put(progress, draws, row, one, upcoming.draws)
                if upcoming.config != configs[row]:
                    configs[row] = upcoming.config
                    config = Decoding.together(configs, kinds)
                numbers[row], upcoming = upcoming.number, next(waiting, None)
        idle = numbers.count(None)
        if idle == batch_size:
            return
        enough = batch_size if upcoming is None else idle + 1
        progress, draws, output = run(models, params, progress, draws, config, enough, most)
        finished, output = jax.device_get((progress.finished, output))
        leaves, tree = jax.tree.flatten(output)
        for row, number in enumerate(numbers):
            if number is None:
                continue
            if not finished[row]:
                if ends is None:
                    continue
                if not ends(number, output.tokens[row, : output.lengths[row]].tolist()):
                    continue
                progress = _end(progress, row)
            yield number, jax.tree.unflatten(tree, [rows[row : row + 1] for rows in leaves])
            numbers[row] = None


def _empty(
    models: Models, params: Params, text: Text, config: Decoding, size: int, batch_size: int
) -> tuple[Progress, Array]:
    """The progress and the random numbers of rows that have no text yet."""
    inputs = jax.ShapeDtypeStruct((batch_size, *text.inputs.shape[1:]), text.inputs.dtype)
    start = functools.partial(loop.start, models, config=config, cache_length=size)
    progress = jax.eval_shape(start, params, inputs)
    draws = jax.ShapeDtypeStruct((batch_size, *text.draws.shape[1:]), text.draws.dtype)
    leaves, tree = jax.tree.flatten((progress, draws))
    progress, draws = jax.tree.unflatten(tree, _zeros(tuple(leaves)))
    return dataclasses.replace(progress, finished=np.ones(batch_size, bool)), draws


@functools.partial(jax.jit, static_argnums=0)
def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[Array]:
    """Zeros of these shapes, by one program for all."""
    return [jnp.zeros(x.shape, x.dtype) for x in shapes]
