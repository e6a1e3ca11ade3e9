"""Tokens a second over batch size, with a draft and without.

At batch 1 a step waits for weights, which many positions share. The more rows a batch has, the more
its positions cost, and guesses that are rejected are paid for.
"""

import dataclasses
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from speculative.pair import Result
from speculative.progress import OnProgress
from speculative.rows import environment
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload

ROUNDS = 7
TEXTS = 8  # That each row of a batch decodes at least, so that its last ones matter little.


@dataclasses.dataclass(frozen=True)
class Batch:
    """What was measured at a batch size."""

    batch_size: int
    passes: int  # Times that the texts are decoded in a round.
    # Of each round, autoregressive and speculative, which took turns.
    seconds: list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Batches:
    """What was measured at all batch sizes, ascending from 1."""

    config: RowConfig
    texts: int
    tokens: tuple[int, int]  # Of the texts, autoregressive and speculative.
    tokens_per_call: float  # Of speculative decoding.
    batches: list[Batch]

    def rate(self, batch: Batch, way: int) -> float:
        """Tokens a second: 0 autoregressive, 1 speculative."""
        return batch.passes * self.tokens[way] / float(np.median(batch.seconds, axis=0)[way])

    def speedup(self, batch: Batch) -> float:
        """How many times as fast speculative decoding is: the median of the rounds."""
        alone, fast = np.array(batch.seconds).T
        # Texts of both ways may differ in length.
        return float(np.median(alone / fast)) * self.tokens[1] / self.tokens[0]

    def to_json(self) -> str:
        """All of it, with machine, commit and settings."""
        fields: dict[str, Any] = (
            dataclasses.asdict(self) | {"gin": self.config.gin()} | environment.here()
        )
        del fields["config"]
        for shown, batch in zip(fields["batches"], self.batches, strict=True):
            shown["tokens_per_second"] = [self.rate(batch, way) for way in (0, 1)]
            shown["speedup"] = self.speedup(batch)
        return json.dumps(fields, indent=1)


def measure(work: Workload, sizes: Sequence[int], gamma: int, on_progress: OnProgress) -> Batches:
    """Decodes a workload's texts at each batch size, both ways in turn."""
    count = len(work.sources)
    batches = [Batch(size, -(-TEXTS * size // count), []) for size in sizes]
    found: list[list[Result]] = []
    for i, batch in enumerate(batches):
        on_progress(f"batch {batch.batch_size}, compiling", i / len(batches))
        found = [_decode(work, way, batch)[0] for way in (0, gamma)]
    gc.freeze()  # A collection looks at all that compiling left, which takes a third of a second.
    for turn in range(ROUNDS):
        for i, batch in enumerate(batches):
            on_progress(f"batch {batch.batch_size}, texts", (turn + i / len(batches)) / ROUNDS)
            # All that is compared is timed in turn, for machines change speed.
            alone, fast = (_decode(work, way, batch)[1] for way in (0, gamma))
            batch.seconds.append((alone, fast))
    gc.unfreeze()
    alone, fast = (sum(len(result.tokens) for result in results) for results in found)
    calls = sum(result.target_calls for result in found[1])
    return Batches(work.config, count, (alone, fast), fast / calls, batches)


def _decode(work: Workload, gamma: int, batch: Batch) -> tuple[list[Result], float]:
    """The results of all texts, and the seconds of decoding them as often as a batch size asks."""
    count = len(work.sources)
    # Each source is read anew; those that share an array would be read once.
    asked = [work.request(i % count, gamma) for i in range(count * batch.passes)]
    jax.block_until_ready(asked[-1].source)
    began = time.perf_counter()
    found = dict(work.pair.serve(asked, batch_size=batch.batch_size))
    return [found[i] for i in range(count)], time.perf_counter() - began
