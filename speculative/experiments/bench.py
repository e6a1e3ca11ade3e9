"""How far decoding steps are from what the device allows: times, bytes, and the floor they set."""

import dataclasses
import functools
import json
import pathlib
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
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from speculative.decoding import Output, Params, random_draws
from speculative.decoding.speculative import stream
from speculative.drafts import TransformerDraft
from speculative.experiments import environment, plan, progress, weights
from speculative.experiments.settings import RowConfig
from speculative.experiments.tuning import OnProgress
from speculative.experiments.workload import Workload, workload
from speculative.measurement import hardware
from speculative.measurement.timing import ITERATIONS, Costs
from speculative.models import read_by_step
from speculative.types import PyTree

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Positions of a pass that are timed, where nothing else is said."""

GAMMAS = (1, 3, 5, 7, 15)
"""Numbers of guesses whose whole steps are timed."""

TURNS = 7


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass of `extend` over so many positions.

    Attributes:
        width: positions.
        ms: of the pass, its logits included.
        bytes: parameters and caches that it cannot do without reading.
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
        compile_seconds: of the programs that decode plainly and speculatively, from nothing.
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

        def passes(found: list[Pass]) -> list[dict[str, Any]]:
            return [dataclasses.asdict(one) | {"percent": self.percent(one)} for one in found]

        costs = self.costs
        fields: dict[str, Any] = {
            "target": self.config.target,
            "draft": self.config.draft,
            "dtype": self.dtype,
            "source_length": self.config.source_length,
            "cache_length": self.config.max_length,
            "device": environment.device(),
            "jax_version": jax.__version__,
            "commit": environment.commit(),
            "parameters_read_by_step": self.parameters,
            "read_bandwidth": self.bandwidth,
            "passes": passes(self.passes),
            "draft_passes": passes(self.draft_passes),
            "ms_target_step": costs.ms_target_step,
            "ms_prefill_target": costs.ms_prefill_target,
            "ms_prefill_draft": costs.ms_prefill_draft,
            "gammas": {
                str(gamma): {
                    "c": costs.c(gamma),
                    "v": costs.verify_cost(gamma),
                    "ms_verify": costs.ms_verify[gamma],
                    "ms_draft_step": costs.ms_draft_step(gamma),
                }
                for gamma in costs.ms_verify
            },
            "compile_seconds": self.compile_seconds,
            "operation_us": self.operation_us,
            "host_us_per_step": self.host_us,
            "gin": self.config.gin(),
        }
        return json.dumps(fields, indent=2)


def require(config: RowConfig, widths: Sequence[int]) -> None:
    """Checks all that can be checked before anything is loaded.

    Raises:
        ValueError: a width is below 1 or beyond the cache, or as `plan.require`.
    """
    if min(widths) < 1 or max(widths) > config.max_length // 2:
        raise ValueError(
            f"Widths must lie between 1 and {config.max_length // 2}, half of the cache of "
            f"{config.max_length} positions, not {min(widths)} to {max(widths)}; give a larger "
            "--cache_length."
        )
    plan.require(config, config.source_length)


def bench(config: RowConfig, widths: Sequence[int], told: OnProgress) -> Bench:
    """Measures a pair, on made-up text.

    Args:
        config: target, draft, dtype; `max_length` positions of the caches, half of them filled,
            and `source_length` tokens of the source.
        widths: positions of a pass, ascending, the first of them 1.
        told: of the progress.
    """
    told("loading", 0.0)
    work = workload(weights.Loader()(config), config, None)
    pair = work.pair
    told("bandwidth", 0.1)
    bandwidth = hardware.read_bandwidth()
    told("compiling", 0.15)
    compiled = {
        "autoregressive": _compile_seconds(work, 0),
        "speculative": _compile_seconds(work, 5),
    }
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
        told("passes", 0.3 + 0.6 * (turn + 1) / TURNS)
    passes = {
        (whose, width): Pass(width, statistics.median(times[whose, width]), timed[whose, width][1])
        for whose, width in timed
    }
    told("streaming", 0.9)
    return Bench(
        config,
        work.dtype,
        sum(leaf.size for leaf in read_by_step(pair.params.target)),
        bandwidth,
        [found for (whose, _), found in passes.items() if whose == "target"],
        [found for (whose, _), found in passes.items() if whose == "draft"],
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
    source, cache = work.sources[0], config.max_length
    model, params = pair.target, pair.params.target
    state = jax.jit(model.start, static_argnums=2)(params, source, cache)
    if of_draft:
        assert isinstance(pair.draft, TransformerDraft)
        model, params = pair.draft.model, pair.params.draft
        state = pair.draft.start(params, source, cache, state).model
    state = jax.jit(model.extend)(params, state, jnp.ones((1, cache // 2), jnp.int32))[1]

    @functools.partial(jax.jit, static_argnums=2)
    def loop(params: PyTree, state: Any, width: int) -> Any:
        def body(_: Array, carried: tuple[Array, Any]) -> tuple[Array, Any]:
            tokens, state = carried
            logits, after = model.extend(params, state, tokens)
            # The next pass waits for all logits of this one, whatever they are.
            waits = lax.optimization_barrier(logits)[0, 0, 0] > 1e30
            tokens = jnp.full((1, width), waits.astype(jnp.int32))
            return tokens, model.rewind(after, state.lengths)

        return lax.fori_loop(0, ITERATIONS, body, (jnp.ones((1, width), jnp.int32), state))

    caches = [*state.keys, *state.values]
    positions = state.keys[0].shape[1]
    sources = [*getattr(state, "cross_keys", ()), *getattr(state, "cross_values", ())]
    whole = sum(leaf.nbytes for leaf in [*sources, *read_by_step(params)])
    for width in widths:
        # A prompt stands before the text, in the same caches.
        seen = cache // 2 + width + positions - cache
        read = whole + sum(leaf.nbytes for leaf in caches) * seen // positions
        yield width, (functools.partial(loop, params, state, width), read)


def _compile_seconds(work: Workload, gamma: int) -> float:
    """Of the program that decodes a text in one dispatch, with no cache of compiled programs."""
    pair, config = work.pair, work.decoding(gamma)
    draws = random_draws(0, np.array([0]), config.capacity)

    def run(params: Params, source: Array, draws: Array) -> Output:
        return dataclasses.replace(pair, params=params).run(source, draws, config)

    with _nothing_compiled():
        began = time.perf_counter()
        jax.jit(run).lower(pair.params, work.sources[0], draws).compile()
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
    draws = random_draws(0, np.array([0]), config.capacity)
    pair, source = work.pair, work.sources[0]

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


def show(found: Bench, console: Console) -> None:
    """Prints what was measured, as tables."""
    config, costs = found.config, found.costs
    console.print(
        f"{config.target} with {config.draft}, {found.dtype}, on {environment.device()}: a "
        f"streaming read takes {found.bandwidth / 1e9:.1f} GB/s.",
        highlight=False,
    )
    shown = Table(
        title=f"Passes over a cache of {config.max_length} positions, half of it filled",
        box=None,
        pad_edge=False,
    )
    for head in ("model", "positions", "ms", "over one", "MB read", "GB/s", "% of the read"):
        shown.add_column(head, justify="right")
    for name, passes in ((config.target, found.passes), (config.draft, found.draft_passes)):
        for one in passes:
            shown.add_row(
                name,
                str(one.width),
                f"{one.ms:.3f}",
                f"{one.ms / passes[0].ms:.2f}",
                f"{one.bytes / 1e6:.1f}",
                f"{one.bandwidth / 1e9:.1f}",
                f"{found.percent(one):.0f}",
                end_section=one is passes[-1],
            )
    console.print(shown)
    steps = Table(
        title=f"Steps from an empty cache; a plain one takes {costs.ms_target_step:.3f} ms",
        box=None,
        pad_edge=False,
    )
    for head in ("γ", "c", "v", "ms to verify", "ms a guess"):
        steps.add_column(head, justify="right")
    for gamma in costs.ms_verify:
        cells = (
            f"{costs.c(gamma):.3f}",
            f"{costs.verify_cost(gamma):.2f}",
            f"{costs.ms_verify[gamma]:.3f}",
            f"{costs.ms_draft_step(gamma):.3f}",
        )
        steps.add_row(str(gamma), *cells)
    console.print(steps)
    plain, guessed = found.compile_seconds.values()
    console.print(
        f"Prefill of {config.source_length} tokens: {costs.ms_prefill_target:.2f} ms for the "
        f"target, {costs.ms_prefill_draft:.2f} ms for the draft. Compiling: {plain:.1f} s plain, "
        f"{guessed:.1f} s speculative. An operation that does nothing: {found.operation_us:.2f} "
        f"us. Streaming: {found.host_us:.0f} us more a step.",
        highlight=False,
    )


def plot(found: Bench) -> Figure:
    """Time over positions of a target pass, above the floor that reading sets."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    widths = [one.width for one in found.passes]
    floor = [1e3 * one.bytes / found.bandwidth for one in found.passes]
    axes.fill_between(widths, floor, color="0.88", label="reading parameters and caches")
    axes.plot(widths, [one.ms for one in found.passes], "o-", color="#0072b2", label="a pass")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths], minor=False)
    axes.set_xlabel("positions")
    axes.set_ylabel("ms")
    axes.set_ylim(0)
    axes.set_title(f"{found.config.target}, {found.dtype}, {environment.device()}")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def run(config: RowConfig, widths: Sequence[int], folder: pathlib.Path, console: Console) -> None:
    """Measures a pair, prints it, and writes `bench.json` and `bench.png` into a folder."""
    widths = sorted({1, *widths})
    require(config, widths)
    folder.mkdir(parents=True, exist_ok=True)
    with progress.alone(config.target) as told:
        found = bench(config, widths, told)
    (folder / "bench.json").write_text(found.to_json() + "\n", encoding="utf-8")
    plot(found).savefig(folder / "bench.png", dpi=150)
    show(found, console)
