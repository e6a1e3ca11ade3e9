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
from typing import Any

from speculative.measurement.timing import TURNS, CostMeter, Costs
from speculative.pair import Request, Result
from speculative.progress import OnProgress
from speculative.rows import environment
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload

ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Batch:
    """What was measured at a batch size; pairs are of autoregressive and speculative decoding.

    Attributes:
        seconds: of all texts, by round.
        step_ms: of a step of all rows, timed by itself.
        steps: that these texts take.
    """

    batch_size: int
    seconds: list[tuple[float, float]]
    step_ms: tuple[float, float]
    steps: tuple[int, int]

    @property
    def speedup(self) -> float:
        """How many times as fast speculative decoding is: the median of the rounds."""
        return statistics.median(alone / fast for alone, fast in self.seconds)

    def median(self, way: int) -> float:
        """Seconds of all texts."""
        return statistics.median(both[way] for both in self.seconds)


@dataclasses.dataclass(frozen=True)
class Batches:
    """What was measured at all batch sizes, ascending from 1.

    Attributes:
        texts: that were decoded, with so many `tokens` in all, both ways.
        tokens_per_call: of speculative decoding.
        prefill_ms: of a text, both ways; each is read by itself.
    """

    config: RowConfig
    texts: int
    tokens: tuple[int, int]
    tokens_per_call: float
    prefill_ms: tuple[float, float]
    batches: list[Batch]

    def rate(self, batch: Batch, way: int) -> float:
        """Tokens a second: 0 autoregressive, 1 speculative."""
        return self.tokens[way] / batch.median(way)

    def predicted(self, batch: Batch, way: int) -> float:
        """Tokens a second by the times of steps and prefills, and by how many there are."""
        ms = batch.steps[way] * batch.step_ms[way] + self.texts * self.prefill_ms[way]
        return 1e3 * self.tokens[way] / ms

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
    ways = [work.decoding(0), work.decoding(gamma)]
    requests = [
        [Request(work.source(i), way, work.config.seed, i) for i in range(len(work.sources))]
        for way in ways
    ]

    def decode(way: int, batch_size: int) -> tuple[dict[int, Result], float]:
        began = time.perf_counter()
        found = dict(work.pair.serve(requests[way], batch_size))
        return found, time.perf_counter() - began

    costs: list[Costs] = []
    seconds: list[list[tuple[float, float]]] = [[] for _ in sizes]
    results: list[dict[int, Result]] = []
    for i, size in enumerate(sizes):
        on_progress(f"batch {size}, steps", i / len(sizes))
        costs.append(_costs(work, size, gamma))
        results = [decode(way, size)[0] for way in (0, 1)]  # Compiled here.
    for turn in range(ROUNDS):
        for i, size in enumerate(sizes):
            on_progress(f"batch {size}, texts", turn / ROUNDS)
            seconds[i].append((decode(0, size)[1], decode(1, size)[1]))
    calls = [[found[i].target_calls for i in sorted(found)] for found in results]
    tokens = [sum(len(result.tokens) for result in found.values()) for found in results]
    alone, both = costs[0].ms_prefill_target, costs[0].ms_prefill_draft
    batches = [
        Batch(
            size,
            seconds[i],
            (cost.ms_target_step, cost.ms_verify[gamma] + cost.ms_proposal[gamma]),
            (steps(calls[0], size), steps(calls[1], size)),
        )
        for i, (size, cost) in enumerate(zip(sizes, costs, strict=True))
    ]
    return Batches(
        work.config,
        len(work.sources),
        (tokens[0], tokens[1]),
        tokens[1] / sum(calls[1]),
        (alone, alone + both),
        batches,
    )


def _costs(work: Workload, batch_size: int, gamma: int) -> Costs:
    """The times of steps with so many rows, in the caches that batches have."""
    config = dataclasses.replace(work.decoding(gamma), growing=False)
    (cache,) = config.cache_lengths()
    given = work.pair, work.config.sampling, [gamma], work.sources.shape[1], cache, config.rule
    meter = CostMeter(*given, batch_size)
    for _ in range(TURNS):
        meter.turn()
    return meter.costs()
