"""Compares decoding steps with the device's limits, and speculation's gain across batch sizes.

At batch 1 a step waits for weights, which many positions share. The more rows a batch has, the more
its positions cost, including those of rejected guesses.
"""

import dataclasses
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from speculative.decoding.tracing import start_target
from speculative.drafts import HiddenDraft, TransformerDraft
from speculative.loading import Resolved
from speculative.measurement import hardware
from speculative.measurement.timing import ITERATIONS, Costs
from speculative.models import Config, read_by_step
from speculative.models.interface import Chunk, Model
from speculative.models.sharding import bytes_a_device
from speculative.pair import Result
from speculative.progress import OnProgress
from speculative.rows import environment, memory, weights
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload, workload
from speculative.types import PyTree

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # Positions per pass that are timed by default.
GAMMAS = (1, 3, 5, 7, 15)  # Numbers of guesses whose whole steps are timed.
TURNS = 7
ROUNDS = 7  # Rounds of decoding the texts at each batch size.
TEXTS = 8  # The least number of texts per row of a batch, so that rows idle little at the end.


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass of `extend`: its positions, its time, and the parameters and caches it must read."""

    width: int
    ms: float
    bytes: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second, as if only reading took time."""
        return self.bytes / self.ms * 1e3


@dataclasses.dataclass(frozen=True)
class Bench:
    """The measurements of a pair."""

    config: RowConfig
    model: Config  # The target's.
    parameters: int  # The number of parameters that a target step reads.
    bandwidth: float  # Bytes per second of a streaming read.
    passes: list[Pass]  # The target's, over several widths.
    draft_passes: list[Pass]  # The draft's, if it is a model, over one position and over two.
    costs: Costs  # The costs of decoding steps, from an empty cache.

    def percent(self, one: Pass) -> float:
        """A pass's bandwidth in percent of the streaming read's."""
        return 100 * one.bandwidth / self.bandwidth

    def to_json(self) -> str:
        """The measurements with machine, commit and settings."""
        config, costs = self.config, self.costs
        fields: dict[str, Any] = {
            "target": config.target,
            "draft": config.draft,
            "dtype": self.model.dtype,
            "quantize": self.model.quantize,
            "source_length": config.random_length,
            "cache_length": config.max_length,
            **environment.here(),
            "parameters_read_by_step": self.parameters,
            "read_bandwidth": self.bandwidth,
            **dataclasses.asdict(costs),
            "c": {gamma: costs.c(gamma) for gamma in costs.ms_verify},
            "v": {gamma: costs.verify_cost(gamma) for gamma in costs.ms_verify},
            "gin": config.gin(),
        }
        for name, passes in (("passes", self.passes), ("draft_passes", self.draft_passes)):
            fields[name] = [vars(one) | {"percent": self.percent(one)} for one in passes]
        return json.dumps(fields, indent=2)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The measurements at one batch size."""

    batch_size: int
    passes: int  # How often the texts are decoded in a round.
    # In each round, autoregressive and speculative, which took turns.
    seconds: list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Batches:
    """The measurements at all batch sizes, ascending from 1."""

    config: RowConfig
    texts: int
    tokens: tuple[int, int]  # In all texts, autoregressive and speculative.
    tokens_per_call: float  # In speculative decoding.
    batches: list[Batch]

    def rate(self, batch: Batch, way: int) -> float:
        """Tokens per second; the way is 0 for autoregressive, 1 for speculative decoding."""
        return batch.passes * self.tokens[way] / float(np.median(batch.seconds, axis=0)[way])

    def speedup(self, batch: Batch) -> float:
        """The speed-up of speculative decoding: the median of the rounds."""
        alone, fast = np.array(batch.seconds).T
        # The texts of the two ways may differ in length.
        return float(np.median(alone / fast)) * self.tokens[1] / self.tokens[0]

    def to_json(self) -> str:
        """The measurements with machine, commit and settings."""
        fields: dict[str, Any] = (
            dataclasses.asdict(self) | {"gin": self.config.gin()} | environment.here()
        )
        del fields["config"]
        for shown, batch in zip(fields["batches"], self.batches, strict=True):
            shown["tokens_per_second"] = [self.rate(batch, way) for way in (0, 1)]
            shown["speedup"] = self.speedup(batch)
        return json.dumps(fields, indent=1)


def resolve(config: RowConfig, widths: Sequence[int]) -> Resolved:
    """Resolves the models for `bench`; ValueError if the row cannot be measured."""
    if min(widths) < 1 or max(widths) > config.max_length // 2:
        raise ValueError(
            f"Widths must lie between 1 and {config.max_length // 2}, half of the cache of "
            f"{config.max_length} positions, not {min(widths)} to {max(widths)}; give a larger "
            "--max_length."
        )
    if config.tree:
        raise ValueError(
            f"bench times chains of guesses, and tree is {config.tree}; leave it out, or give "
            "--batch_sizes. (speculative tune times trees.)"
        )
    resolved = weights.resolve(config)
    memory.require(config, resolved.configs, config.random_length)
    return resolved


def bench(
    config: RowConfig, widths: Sequence[int], resolved: Resolved, on_progress: OnProgress
) -> Bench:
    """Measures a row's pair on random text.

    Caches have `config.max_length` positions, half of them filled, and the source has
    `config.random_length` tokens. Widths ascend from 1.
    """
    on_progress("loading", 0)
    work = workload(resolved.load(), config, None)
    pair, cache = work.pair, config.max_length
    on_progress("bandwidth", 0)
    bandwidth = hardware.read_bandwidth()
    on_progress("compiling", 0)
    meter = work.meter(sorted({*GAMMAS, config.gamma or 5}), [cache])
    target, source = pair.params.target, work.source(0)
    started = start_target(pair.target, target, source, cache, None, pair.draft.layers)
    timed = _passes(pair.target, target, started.state, cache, widths)
    if isinstance(pair.draft, TransformerDraft | HiddenDraft):
        state = pair.draft.start(pair.params.draft, source, cache, started).model
        timed += _passes(pair.draft.model, pair.params.draft, state, cache, (1, 2))
    for _, _, run, _ in timed:
        jax.block_until_ready(run())
    for turn in range(TURNS):
        on_progress("timing", turn / TURNS)
        meter.turn()
        for _, _, run, times in timed:
            times.append(1e3 * hardware.elapsed(run) / ITERATIONS)
    passes = [Pass(width, statistics.median(times), size) for width, size, _, times in timed]
    return Bench(
        config,
        pair.target.config,
        sum(leaf.size for leaf in read_by_step(target)),
        bandwidth,
        passes[: len(widths)],
        passes[len(widths) :],
        meter.costs(),
    )


def _passes(
    model: Model, params: PyTree, state: Any, cache: int, widths: Sequence[int]
) -> list[tuple[int, int, Callable[[], Any], list[float]]]:
    """For each width: itself, the bytes a pass reads, a loop of `ITERATIONS` passes, and a list.

    Half of the cache is filled. The list is empty; the caller adds the loop's times.
    """
    half = Chunk(jnp.ones((1, cache // 2), jnp.int32))
    state = jax.jit(model.extend)(params, state, half).state

    @functools.partial(jax.jit, static_argnums=2)
    def loop(params: PyTree, state: Any, width: int) -> Any:
        def body(_: Any, carried: tuple[Array, Any]) -> tuple[Array, Any]:
            tokens, state = carried
            logits, after, _hidden = model.extend(params, state, Chunk(tokens))
            # The next pass waits for all logits of this one, whatever they are.
            waits = lax.optimization_barrier(logits)[0, 0, 0] > 1e30
            tokens = jnp.full((1, width), waits.astype(jnp.int32))
            return tokens, model.rewind(after, state.lengths)

        return lax.fori_loop(0, ITERATIONS, body, (jnp.ones((1, width), jnp.int32), state))

    caches = [bytes_a_device(both) for both in zip(state.keys, state.values, strict=True)]
    rooms = [keys.shape[2] for keys in state.keys]
    whole = bytes_a_device([state.cross, read_by_step(params)])
    filled = int(state.entries(state.lengths, window=0)[0])
    # Layers with windows may have less room than a long text needs.
    sizes = [
        whole + sum(c * min(filled + width, r) // r for c, r in zip(caches, rooms, strict=True))
        for width in widths
    ]
    loops = [functools.partial(loop, params, state, width) for width in widths]
    return list(zip(widths, sizes, loops, ([] for _ in widths), strict=True))


def batches(work: Workload, sizes: Sequence[int], gamma: int, on_progress: OnProgress) -> Batches:
    """Decodes a workload's texts at each batch size, both ways in turn."""
    count = len(work.sources)
    measured = [Batch(size, -(-TEXTS * size // count), []) for size in sizes]
    both: list[list[Result]] = []
    for i, batch in enumerate(measured):
        on_progress(f"batch {batch.batch_size}, compiling", i / len(sizes))
        both = [_decode(work, way, batch)[0] for way in (0, gamma)]
    gc.freeze()  # The garbage collector would scan compiled programs, for a third of a second.
    for turn in range(ROUNDS):
        for i, batch in enumerate(measured):
            on_progress(f"batch {batch.batch_size}, texts", (turn + i / len(sizes)) / ROUNDS)
            # Everything compared is timed in turn, because machines change speed.
            alone, fast = (_decode(work, way, batch)[1] for way in (0, gamma))
            batch.seconds.append((alone, fast))
    gc.unfreeze()
    alone, fast = (sum(len(result.tokens) for result in results) for results in both)
    calls = sum(result.target_calls for result in both[1])
    return Batches(work.config, count, (alone, fast), fast / calls, measured)


def _decode(work: Workload, gamma: int, batch: Batch) -> tuple[list[Result], float]:
    """The results of all texts, and the seconds of decoding them `batch.passes` times."""
    count = len(work.sources)
    # Each source is read anew; requests that share an array would read it once.
    requests = [work.request(i % count, gamma) for i in range(count * batch.passes)]
    jax.block_until_ready(requests[-1].source)
    began = time.perf_counter()
    results = work.pair.decode_all(requests, batch_size=batch.batch_size)
    return results[:count], time.perf_counter() - began
