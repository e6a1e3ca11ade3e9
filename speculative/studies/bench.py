"""How far decoding steps are from what the device allows: times, bytes, and the floor they set."""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.compilation_cache import compilation_cache

from speculative.decoding import Output, Params
from speculative.decoding.loop import stream
from speculative.drafts import TransformerDraft
from speculative.drafts.base import layers_read
from speculative.loading import Resolved
from speculative.measurement import hardware
from speculative.measurement.timing import ITERATIONS, Costs
from speculative.models import read_by_step
from speculative.progress import OnProgress
from speculative.rows import environment, memory, weights
from speculative.rows.config import RowConfig
from speculative.rows.workload import Workload, workload
from speculative.types import PyTree

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Positions of a pass that are timed, where nothing else is said."""

GAMMAS = (1, 3, 5, 7, 15)
"""Numbers of guesses whose whole steps are timed."""

TURNS = 7


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass of `extend` over `width` positions: its time, logits included, and what it reads.

    `bytes` are the parameters and caches that it must read.
    """

    width: int
    ms: float
    bytes: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second, as if nothing but reading took time."""
        return self.bytes / self.ms * 1e3


@dataclasses.dataclass(frozen=True)
class Bench:
    """What was measured of a pair.

    Attributes:
        config: names and lengths.
        dtype: of the target's products.
        parameters: numbers that a target step reads.
        bandwidth: bytes a second of a streaming read.
        passes: of the target, over several widths.
        draft_passes: of the draft over one position and over two, if it is a model.
        costs: of the steps of decoding, from an empty cache.
        compile_seconds: of the programs for autoregressive and speculative decoding, from nothing.
        operation_us: what an operation costs that does next to nothing.
        host_us: what a step costs more where the host drives it, streaming, than on the device.
    """

    config: RowConfig
    dtype: str
    parameters: int
    bandwidth: float
    passes: list[Pass]
    draft_passes: list[Pass]
    costs: Costs
    compile_seconds: dict[str, float]
    operation_us: float
    host_us: float

    def percent(self, one: Pass) -> float:
        """Of the streaming read's bandwidth."""
        return 100 * one.bandwidth / self.bandwidth

    def to_json(self) -> str:
        """All of it, with machine, commit and settings."""
        config, costs = self.config, self.costs
        fields: dict[str, Any] = {
            "target": config.target,
            "draft": config.draft,
            "dtype": self.dtype,
            "source_length": config.source_length,
            "cache_length": config.max_length,
            **environment.here(),
            "parameters_read_by_step": self.parameters,
            "read_bandwidth": self.bandwidth,
            "ms_target_step": costs.ms_target_step,
            "ms_prefill_target": costs.ms_prefill_target,
            "ms_prefill_draft": costs.ms_prefill_draft,
            "gammas": {
                str(gamma): {
                    "c": costs.c(gamma),
                    "v": costs.verify_cost(gamma),
                    "ms_verify": ms,
                    "ms_draft_step": costs.ms_draft_step(gamma),
                }
                for gamma, ms in costs.ms_verify.items()
            },
            "compile_seconds": self.compile_seconds,
            "operation_us": self.operation_us,
            "host_us_per_step": self.host_us,
            "gin": config.gin(),
        }
        for name, passes in (("passes", self.passes), ("draft_passes", self.draft_passes)):
            fields[name] = [vars(one) | {"percent": self.percent(one)} for one in passes]
        return json.dumps(fields, indent=2)


def resolve(config: RowConfig, widths: Sequence[int]) -> Resolved:
    """The models to measure; all that can be checked before they are loaded is checked.

    Raises:
        ValueError: a width is below 1 or beyond the cache, or as `weights.resolve` and
            `memory.require`.
    """
    if min(widths) < 1 or max(widths) > config.max_length // 2:
        raise ValueError(
            f"Widths must lie between 1 and {config.max_length // 2}, half of the cache of "
            f"{config.max_length} positions, not {min(widths)} to {max(widths)}; give a larger "
            "--cache_length."
        )
    found = weights.resolve(config)
    memory.require(config, found.configs, config.source_length)
    return found


def bench(
    config: RowConfig, found: Resolved, widths: Sequence[int], on_progress: OnProgress
) -> Bench:
    """Measures a pair, on random text.

    Args:
        config: target, draft, dtype; `max_length` positions of the caches, half of them filled,
            and `source_length` tokens of the source.
        found: its models.
        widths: positions of a pass, ascending, the first of them 1.
        on_progress: called with what is being done and its share that is done.
    """
    on_progress("loading", 0.0)
    work = workload(found.load(), config, None)
    pair = work.pair
    on_progress("bandwidth", 0.1)
    bandwidth = hardware.read_bandwidth()
    on_progress("compiling", 0.15)
    ways = {"autoregressive": 0, "speculative": 5}
    compiled = {name: _compile_seconds(work, gamma) for name, gamma in ways.items()}
    meter = work.meter(GAMMAS, [config.max_length])
    timed = {("target", width): passing for width, passing in _passes(work, False, widths)}
    if isinstance(pair.draft, TransformerDraft):
        timed |= {("draft", width): passing for width, passing in _passes(work, True, (1, 2))}
    for run, _ in timed.values():
        jax.block_until_ready(run())
    times: dict[Any, list[float]] = {kind: [] for kind in timed}
    for turn in range(TURNS):
        meter.turn()
        for kind, (run, _) in timed.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[kind].append(1e3 * (time.perf_counter() - began) / ITERATIONS)
        on_progress("passes", 0.3 + 0.6 * (turn + 1) / TURNS)
    passes: dict[str, list[Pass]] = {"target": [], "draft": []}
    for (whose, width), (_, read) in timed.items():
        passes[whose].append(Pass(width, statistics.median(times[whose, width]), read))
    on_progress("streaming", 0.9)
    return Bench(
        config,
        work.dtype,
        sum(leaf.size for leaf in read_by_step(pair.params.target)),
        bandwidth,
        passes["target"],
        passes["draft"],
        meter.costs(),
        compiled,
        1e6 * hardware.operation_seconds(),
        1e6 * _host_seconds(work),
    )


def _passes(
    work: Workload, of_draft: bool, widths: Sequence[int]
) -> Iterator[tuple[int, tuple[Callable[[], Any], int]]]:
    """By width, a loop of `ITERATIONS` passes on half a cache, and the bytes that each reads."""
    pair, config = work.pair, work.config
    source, cache = work.source(0), config.max_length
    model, params = pair.target, pair.params.target
    started = jax.jit(model.start, static_argnums=(2, 4))(
        params, source, cache, None, layers_read(pair.draft)
    )
    state = started.state
    if of_draft:
        assert isinstance(pair.draft, TransformerDraft)
        model, params = pair.draft.model, pair.params.draft
        state = pair.draft.start(params, source, cache, started).model
    state = jax.jit(model.extend)(params, state, jnp.ones((1, cache // 2), jnp.int32)).state

    @functools.partial(jax.jit, static_argnums=2)
    def loop(params: PyTree, state: Any, width: int) -> Any:
        def body(_: Any, carried: tuple[Array, Any]) -> tuple[Array, Any]:
            tokens, state = carried
            logits, after, _hidden = model.extend(params, state, tokens)
            # The next pass waits for all logits of this one, whatever they are.
            waits = lax.optimization_barrier(logits)[0, 0, 0] > 1e30
            tokens = jnp.full((1, width), waits.astype(jnp.int32))
            return tokens, model.rewind(after, state.lengths)

        return lax.fori_loop(0, ITERATIONS, body, (jnp.ones((1, width), jnp.int32), state))

    caches = [*state.keys, *state.values]
    positions = state.keys[0].shape[1]
    sources = jax.tree.leaves(state.cross)  # None of a decoder-only model.
    whole = sum(leaf.nbytes for leaf in [*sources, *read_by_step(params)])
    for width in widths:
        # A prompt stands before the text, in the same caches.
        seen = cache // 2 + width + positions - cache
        read = whole + sum(leaf.nbytes for leaf in caches) * seen // positions
        yield width, (functools.partial(loop, params, state, width), read)


def _compile_seconds(work: Workload, gamma: int) -> float:
    """Of the program that decodes a text in one dispatch, with no cache of compiled programs."""
    pair, config = work.pair, work.decoding(gamma)
    draws = config.draws(0, np.array([0]))

    def run(params: Params, source: Array, draws: Array) -> Output:
        return dataclasses.replace(pair, params=params).run(source, draws, config)

    with _nothing_compiled():
        began = time.perf_counter()
        jax.jit(run).lower(pair.params, work.source(0), draws).compile()
        return time.perf_counter() - began


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Compiled programs are neither looked up nor kept."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _host_seconds(work: Workload) -> float:
    """What each step of a text of full length costs more when it is streamed."""
    config = work.decoding(0).endless
    draws = config.draws(0, np.array([0]))
    pair, source = work.pair, work.source(0)

    def streamed() -> None:
        list(stream(pair.target, None, pair.params, source, draws, config))

    more = []
    for _ in range(TURNS):
        took = [
            hardware.seconds(run, rounds=1)
            for run in (streamed, lambda: pair.run(source, draws, config))
        ]
        more.append(took[0] - took[1])
    return statistics.median(more) / config.max_length
