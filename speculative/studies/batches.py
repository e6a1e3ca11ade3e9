"""Tokens a second over batch size, with a draft and without, and where speculation stops paying.

At batch 1 a step waits for weights, which many positions share. The more rows a batch has, the more
its positions cost, and guesses that are rejected are paid for.
"""

import dataclasses
import functools
import gc
import heapq
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from speculative.decoding import queue
from speculative.measurement.bootstrap import interval
from speculative.measurement.hardware import elapsed
from speculative.measurement.timing import ITERATIONS, timed_calls
from speculative.pair import Request, Result
from speculative.progress import OnProgress
from speculative.rows import environment
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload

ROUNDS = 7
TEXTS = 8  # That each row of a batch decodes at least, so that its last ones matter little.


@dataclasses.dataclass(frozen=True)
class Timed:
    """What one way of decoding took in a round, all of it timed within seconds.

    Attributes:
        seconds: of the texts.
        step_ms: of a step of all rows, by itself.
        apart_ms: of beginning and ending a text between steps, which drive the weights that read a
            source out of the processor's caches.
        together_ms: likewise, of a text that begins right after another one.
    """

    seconds: float
    step_ms: float
    apart_ms: float
    together_ms: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """What was measured at a batch size; pairs are of autoregressive and speculative decoding.

    Attributes:
        passes: times that the texts are decoded in a round.
        steps: that a round takes.
        begins: the number of times in a round at which texts begin, one or several together.
    """

    batch_size: int
    passes: int
    steps: tuple[int, int]
    begins: tuple[int, int]
    rounds: list[tuple[Timed, Timed]]


@dataclasses.dataclass(frozen=True)
class Crossover:
    """The batch size at which speculation stops paying, and its 95% interval.

    `size` is None if it pays at all sizes that were measured; an interval ends at the largest.
    """

    size: float | None
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Batches:
    """What was measured at all batch sizes, ascending from 1.

    Attributes:
        texts: that were decoded, with so many `tokens` in all, both ways.
        tokens_per_call: of speculative decoding.
    """

    config: RowConfig
    texts: int
    tokens: tuple[int, int]
    tokens_per_call: float
    batches: list[Batch]

    def _seconds(self, batch: Batch, predicted: bool) -> NDArray[np.float64]:
        """Seconds of each round [rounds, 2], as measured or as predicted."""

        def seconds(way: int, timed: Timed) -> float:
            if not predicted:
                return timed.seconds
            apart = batch.begins[way]
            texts = apart * timed.apart_ms + (batch.passes * self.texts - apart) * timed.together_ms
            return (batch.steps[way] * timed.step_ms + texts) / 1e3

        return np.array([[seconds(way, both[way]) for way in (0, 1)] for both in batch.rounds])

    def rate(self, batch: Batch, way: int, predicted: bool = False) -> float:
        """Tokens a second: 0 autoregressive, 1 speculative.

        They are predicted by the times of steps and of the texts' beginnings, and by how many
        there are.
        """
        median = float(np.median(self._seconds(batch, predicted)[:, way]))
        return batch.passes * self.tokens[way] / median

    def _speedups(self, batch: Batch, predicted: bool) -> NDArray[np.float64]:
        """Of each round; texts of both ways may differ in length."""
        alone, fast = self._seconds(batch, predicted).T
        return alone / fast * self.tokens[1] / self.tokens[0]

    def speedup(self, batch: Batch, predicted: bool = False) -> float:
        """How many times as fast speculative decoding is: the median of the rounds."""
        return float(np.median(self._speedups(batch, predicted)))

    def crossover(self, predicted: bool = False) -> Crossover:
        """Where speculation stops paying; the interval is that of resampled rounds."""
        sizes = [batch.batch_size for batch in self.batches]
        speedups = np.array([self._speedups(batch, predicted) for batch in self.batches])

        def found(chosen: NDArray[np.intp]) -> float | None:
            return crossover(sizes, np.median(speedups[:, chosen], axis=1).tolist())

        rounds = speedups.shape[1]
        ends = interval(lambda chosen: found(chosen) or sizes[-1], rounds)
        return Crossover(found(np.arange(rounds)), *ends)

    def to_json(self) -> str:
        """All of it, with machine, commit and settings."""
        fields: dict[str, Any] = (
            dataclasses.asdict(self) | {"gin": self.config.gin()} | environment.here()
        )
        del fields["config"]
        for predicted, suffix in ((False, ""), (True, "_predicted")):
            for shown, batch in zip(fields["batches"], self.batches, strict=True):
                rates = [self.rate(batch, way, predicted) for way in (0, 1)]
                shown["tokens_per_second" + suffix] = rates
                shown["speedup" + suffix] = self.speedup(batch, predicted)
            fields["crossover" + suffix] = dataclasses.asdict(self.crossover(predicted))
        return json.dumps(fields, indent=1)


def crossover(sizes: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The batch size at which a speed-up falls to 1, on a line over the logarithm of the sizes.

    None if it does not at these sizes; the first one if it is below 1 from the start.
    """
    if speedups[0] <= 1:
        return float(sizes[0])
    for i in range(1, len(sizes)):
        above, below = speedups[i - 1], speedups[i]
        if below <= 1:
            share = (above - 1) / (above - below)
            return math.exp((1 - share) * math.log(sizes[i - 1]) + share * math.log(sizes[i]))
    return None


def steps(calls: Sequence[int], batch_size: int) -> tuple[int, int]:
    """Steps that a batch takes for texts of so many target calls, each begun in a free row.

    The second number is that of the times at which texts begin, one or several together.
    """
    rows = [0] * min(batch_size, len(calls))
    begins = set()
    for count in calls:
        begins.add(rows[0])
        heapq.heapreplace(rows, rows[0] + count)
    return max(rows), len(begins)


def measure(work: Workload, sizes: Sequence[int], gamma: int, on_progress: OnProgress) -> Batches:
    """Decodes a workload's texts at each batch size, both ways in turn, and times their steps."""
    texts = _Texts(work, gamma)
    found: list[list[Result]] = []
    for i, size in enumerate(sizes):
        on_progress(f"batch {size}, compiling", i / len(sizes))
        found = [texts.decode(way, size)[0] for way in (0, 1)]
    tokens, calls = (
        [sum(count(result) for result in results) for results in found]
        for count in (lambda result: len(result.tokens), lambda result: result.target_calls)
    )
    held = tokens[0] // texts.count // 2
    steps_of: dict[int, tuple[Callable[[], float], Callable[[], float]]] = {}
    for i, size in enumerate(sizes):
        on_progress(f"batch {size}, compiling steps", i / len(sizes))
        steps_of[size] = _steps(work, size, gamma, held)
        for way in (0, 1):
            steps_of[size][way]()
            texts.ends(way, size)
    rounds: list[list[tuple[Timed, Timed]]] = [[] for _ in sizes]
    gc.freeze()  # A collection looks at all that compiling left, which takes a third of a second.
    for turn in range(ROUNDS):
        for i, size in enumerate(sizes):
            on_progress(f"batch {size}, texts", (turn + i / len(sizes)) / ROUNDS)
            # All that is compared is timed in turn, for machines change speed.
            alone, fast = (
                _time(texts, way, size, steps_of[size][way], steps_of[1][way]) for way in (0, 1)
            )
            rounds[i].append((alone, fast))
    gc.unfreeze()
    batches = []
    for size, timed in zip(sizes, rounds, strict=True):
        (alone_steps, alone_begins), (fast_steps, fast_begins) = (
            steps(texts.calls(results, size), size) for results in found
        )
        counted = (alone_steps, fast_steps), (alone_begins, fast_begins)
        batches.append(Batch(size, texts.passes(size), *counted, timed))
    both_tokens = tokens[0], tokens[1]
    return Batches(work.config, texts.count, both_tokens, tokens[1] / calls[1], batches)


class _Texts:
    """The texts of a workload, to be decoded by the target alone (way 0) and with guesses (1)."""

    def __init__(self, work: Workload, gamma: int) -> None:
        self._work = work
        self._ways = work.decoding(0), work.decoding(gamma)
        # Each is read anew; those that share a source would be read once.
        self._read = np.asarray((work.sources != work.pair.target.pad_id).sum(axis=1))
        self.count = len(self._read)

    def passes(self, size: int) -> int:
        """How often the texts are decoded in a round."""
        return -(-TEXTS * size // self.count)

    def decode(self, way: int, size: int) -> tuple[list[Result], float]:
        """The results of all texts, and the seconds of a round."""
        given, count = (self._ways[way], self._work.config.seed), self.count
        asked = [
            Request(self._work.source(i % count), *given, i % count)
            for i in range(count * self.passes(size))
        ]
        jax.block_until_ready(asked[-1].source)
        began = time.perf_counter()
        found = dict(self._work.pair.serve(asked, size))
        return [found[i] for i in range(count)], time.perf_counter() - began

    def calls(self, found: Sequence[Result], size: int) -> list[int]:
        """Target calls of the texts of a round, in the order in which `Pair.serve` begins them."""
        numbers = list(range(self.count)) * self.passes(size)
        return [found[i].target_calls for i in sorted(numbers, key=lambda i: -self._read[i])]

    def ends(self, way: int, size: int) -> tuple[float, int]:
        """Seconds of texts that end after their first step, and how many they are."""
        work, config = self._work, self._ways[way]
        numbers = [i % self.count for i in range(max(size, self.count))]
        sources = jax.block_until_ready([work.source(i) for i in numbers])
        began = time.perf_counter()
        texts = (
            queue.Text(i, source, config.draws(work.config.seed, np.array([i])))
            for i, source in zip(numbers, sources, strict=True)
        )
        given = work.pair.target, work.pair.draft, work.pair.params, texts, config, size
        for _ in queue.generate(*given, lambda *_: True):
            pass
        return time.perf_counter() - began, len(numbers)


def _time(
    texts: _Texts, way: int, size: int, step: Callable[[], float], one: Callable[[], float]
) -> Timed:
    """Times the texts, a step of all rows and one of one row, and beginnings of texts."""
    steps_ms = [step()]
    seconds = texts.decode(way, size)[1]
    steps_ms.append(step())

    def text_ms(rows: int, step_ms: float) -> float:
        seconds, count = texts.ends(way, rows)
        return max(0.0, (1e3 * seconds - -(-count // rows) * step_ms) / count)

    step_ms = statistics.mean(steps_ms)
    together = text_ms(size, step_ms)
    return Timed(seconds, step_ms, text_ms(1, one()), together)


def _steps(
    work: Workload, batch_size: int, gamma: int, held: int
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Calls that time a step, in ms, of so many rows that hold so many tokens; both ways.

    Caches are as wide as those of batches.
    """
    config = dataclasses.replace(work.decoding(gamma), growing=False)
    cache = max(*config.cache_lengths(), ITERATIONS + config.room)
    sources = work.source([i % len(work.sources) for i in range(batch_size)])
    given = work.pair, work.config.sampling, [gamma], sources, cache, config.rule, held
    calls = timed_calls(*given)
    alone, fast = (
        functools.partial(_step_ms, calls[kind]) for kind in (("verify", 0), ("step", gamma))
    )
    return alone, fast


def _step_ms(steps: Callable[[int], Any]) -> float:
    """Of one of the steps of a timed loop, without the loop's beginning."""
    many, none = (elapsed(functools.partial(steps, count)) for count in (ITERATIONS, 0))
    return 1e3 * (many - none) / ITERATIONS
