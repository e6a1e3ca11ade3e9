"""Tokens a second over batch size, with a draft and without, and where speculation stops paying.

At batch 1 a step waits for weights, which many positions share. The more rows a batch has, the more
its positions cost, and guesses that are rejected are paid for.
"""

import dataclasses
import heapq
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from speculative.decoding import queue
from speculative.measurement.timing import ITERATIONS, CostMeter
from speculative.pair import Request, Result, padded
from speculative.progress import OnProgress
from speculative.ragged import power_of_two
from speculative.rows import environment
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload

T = TypeVar("T")

ROUNDS = 5
TURNS = 4  # Of the steps' times in a round.
TEXTS = 8  # That each row of a batch decodes at least, so that its last ones matter little.


@dataclasses.dataclass(frozen=True)
class Batch:
    """What was measured at a batch size; pairs are of autoregressive and speculative decoding.

    Attributes:
        passes: times that the texts are decoded in a round.
        seconds: of a round.
        step_ms: of a step of all rows, timed by itself.
        steps: that a round takes.
        text_ms: of the beginning and the end of a text: it is read, enters a row and leaves it.
    """

    batch_size: int
    passes: int
    seconds: list[tuple[float, float]]
    step_ms: tuple[float, float]
    steps: tuple[int, int]
    text_ms: tuple[float, float]

    @property
    def speedup(self) -> float:
        """How many times as fast speculative decoding is: the median of the rounds."""
        return statistics.median(alone / fast for alone, fast in self.seconds)

    def median(self, way: int) -> float:
        """Seconds of a round."""
        return statistics.median(both[way] for both in self.seconds)


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

    def rate(self, batch: Batch, way: int) -> float:
        """Tokens a second: 0 autoregressive, 1 speculative."""
        return batch.passes * self.tokens[way] / batch.median(way)

    def predicted(self, batch: Batch, way: int) -> float:
        """Tokens a second by the times of steps and of texts, and by how many there are."""
        texts = batch.passes * self.texts
        ms = batch.steps[way] * batch.step_ms[way] + texts * batch.text_ms[way]
        return 1e3 * batch.passes * self.tokens[way] / ms

    def predicted_speedup(self, batch: Batch) -> float:
        """Of speculative decoding at a batch size; texts of both ways may differ in length."""
        return self.predicted(batch, 1) / self.predicted(batch, 0)

    def measured_speedup(self, batch: Batch) -> float:
        """Likewise, as measured."""
        return batch.speedup * self.tokens[1] / self.tokens[0]

    @property
    def crossovers(self) -> tuple[float | None, float | None]:
        """The batch sizes at which speculation stops paying, as measured and as predicted."""
        sizes = [batch.batch_size for batch in self.batches]
        ways = self.measured_speedup, self.predicted_speedup
        measured, predicted = (crossover(sizes, list(map(way, self.batches))) for way in ways)
        return measured, predicted

    def to_json(self) -> str:
        """All of it, with machine, commit and settings."""
        fields: dict[str, Any] = (
            dataclasses.asdict(self) | {"gin": self.config.gin()} | environment.here()
        )
        del fields["config"]
        for shown, batch in zip(fields["batches"], self.batches, strict=True):
            for name, of in (("tokens_per_second", self.rate), ("predicted", self.predicted)):
                shown[name] = [of(batch, way) for way in (0, 1)]
            shown["speedup"] = self.measured_speedup(batch)
            shown["speedup_predicted"] = self.predicted_speedup(batch)
        fields["crossover"], fields["crossover_predicted"] = self.crossovers
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


def steps(calls: Sequence[int], batch_size: int) -> int:
    """Steps that a batch takes for texts of so many target calls, each begun in a free row."""
    rows = [0] * min(batch_size, len(calls))
    for count in calls:
        heapq.heapreplace(rows, rows[0] + count)
    return max(rows)


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
    meters = []
    for i, size in enumerate(sizes):
        on_progress(f"batch {size}, compiling steps", i / len(sizes))
        meters.append(_meter(work, size, gamma, tokens[0] // texts.count // 2))
    seconds: list[list[tuple[float, float]]] = [[] for _ in sizes]
    ends: list[list[tuple[float, float]]] = [[] for _ in sizes]
    for turn in range(ROUNDS):  # All that is compared is timed in turn, for machines change speed.
        for i, (size, meter) in enumerate(zip(sizes, meters, strict=True)):
            on_progress(f"batch {size}, texts", turn / ROUNDS)
            alone, fast = (texts.decode(way, size)[1] for way in (0, 1))
            seconds[i].append((alone, fast))
            for _ in range(TURNS):
                meter.turn()
            ends[i].append((texts.ends(0, size), texts.ends(1, size)))
    batches = []
    for size, meter, both, ended in zip(sizes, meters, seconds, ends, strict=True):
        costs = meter.costs()
        step_ms = costs.ms_target_step, costs.ms_verify[gamma] + costs.ms_proposal[gamma]
        alone, fast = (
            texts.text_ms(size, statistics.median(times[way] for times in ended), step_ms[way])
            for way in (0, 1)
        )
        taken = texts.steps(found[0], size), texts.steps(found[1], size)
        batches.append(Batch(size, texts.passes(size), both, step_ms, taken, (alone, fast)))
    both_tokens = tokens[0], tokens[1]
    return Batches(work.config, texts.count, both_tokens, tokens[1] / calls[1], batches)


class _Texts:
    """The texts of a workload, to be decoded by the target alone (way 0) and with guesses (1)."""

    def __init__(self, work: Workload, gamma: int) -> None:
        self._pair, self._seed = work.pair, work.config.seed
        self._ways = work.decoding(0), work.decoding(gamma)
        pad = work.pair.target.pad_id
        self._rows = [row[row != pad].tolist() for row in np.asarray(work.sources)]
        self.count = len(self._rows)

    def passes(self, size: int) -> int:
        """How often the texts are decoded in a round."""
        return -(-TEXTS * size // self.count)

    def _requests(self, way: int, size: int) -> list[Request]:
        """Of a round; each has a source of its own, because those that share one are read once."""
        given = self._ways[way], self._seed
        rows = self._rows * self.passes(size)
        return [Request(self._pair.row(row), *given, i % self.count) for i, row in enumerate(rows)]

    def decode(self, way: int, size: int) -> tuple[list[Result], float]:
        """The results of all texts, and the seconds of a round."""
        asked = self._requests(way, size)
        began = time.perf_counter()
        found = dict(self._pair.serve(asked, size))
        return [found[i] for i in range(self.count)], time.perf_counter() - began

    def _by_width(self, of_texts: Sequence[T], size: int) -> list[list[T]]:
        """What is given of each text of a round, by its source's width, as `Pair.serve` has it."""
        found: dict[int, list[T]] = {}
        pairs = list(zip(self._rows, of_texts, strict=True)) * self.passes(size)
        for row, given in sorted(pairs, key=lambda pair: len(pair[0]), reverse=True):
            found.setdefault(padded(len(row)), []).append(given)
        return list(found.values())

    def steps(self, found: Sequence[Result], size: int) -> int:
        """Of a round, in which texts whose sources are of one width share batches."""
        calls = self._by_width([result.target_calls for result in found], size)
        return sum(steps(of_width, size) for of_width in calls)

    def ends(self, way: int, size: int) -> float:
        """Seconds of a round of texts that end after their first step."""
        pair, config = self._pair, self._ways[way]
        groups = self._by_width(self._rows, size)
        sources = [[pair.row(row) for row in rows] for rows in groups]
        began = time.perf_counter()
        for of_width in sources:
            texts = (
                queue.Text(i, source, config.draws(self._seed, np.array([i])))
                for i, source in enumerate(of_width)
            )
            rows = min(size, power_of_two(len(of_width)))
            given = pair.target, pair.draft, pair.params, texts, config, rows
            for _ in queue.generate(*given, lambda *_: True):
                pass
        return time.perf_counter() - began

    def text_ms(self, size: int, seconds: float, step_ms: float) -> float:
        """What each text of `ends` takes, but for its step."""
        groups = self._by_width(self._rows, size)
        steps_ms = sum(-(-len(texts) // size) for texts in groups) * step_ms
        return max(0.0, 1e3 * seconds - steps_ms) / sum(map(len, groups))


def _meter(work: Workload, batch_size: int, gamma: int, held: int) -> CostMeter:
    """Times steps of so many rows that hold so many tokens, in the caches of batches."""
    config = dataclasses.replace(work.decoding(gamma), growing=False)
    cache = max(*config.cache_lengths(), ITERATIONS + config.room)
    sources = work.source([i % len(work.sources) for i in range(batch_size)])
    given = work.pair, work.config.sampling, [gamma], sources, cache, config.rule
    return CostMeter(*given, held)
