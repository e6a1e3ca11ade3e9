"""The bench of a pair, measured, printed and drawn."""

import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import Console

from speculative import disk, progress
from speculative.reporting.tables import CONSOLE, Column, grid, table, thousandths
from speculative.rows import environment
from speculative.rows.config import RowConfig
from speculative.studies import bench
from speculative.studies.bench import Bench


def run(config: RowConfig, widths: Sequence[int] | None, folder: pathlib.Path) -> None:
    """Measures a pair, prints it, and writes `bench.json` and `bench.png` into a folder."""
    widths = sorted({1, *(widths or bench.WIDTHS)})
    models = bench.resolve(config, widths)
    files = [disk.writable(folder / f"bench.{kind}") for kind in ("json", "png")]
    with progress.bar(config.target) as on_progress:
        found = bench.bench(config, models, widths, on_progress)
    disk.write(files[0], found.to_json() + "\n")
    with disk.written(files[1]) as part:
        plot(found).savefig(part, dpi=150)
    show(found)
    print(f"Written: {files[0]} and {files[1]}.")


def show(found: Bench, console: Console = CONSOLE) -> None:
    """Prints what was measured, as tables."""
    config, costs = found.config, found.costs
    console.print(
        f"{config.target} with {config.draft}, {found.dtype}, on {environment.device()}: a "
        f"streaming read takes {found.bandwidth / 1e9:.1f} GB/s."
    )
    passes = [
        (
            name,
            str(one.width),
            f"{one.ms:.3f}",
            f"{one.ms / measured[0].ms:.2f}",
            f"{one.bytes / 1e6:.1f}",
            f"{one.bandwidth / 1e9:.1f}",
            f"{found.percent(one):.0f}",
        )
        for name, measured in ((config.target, found.passes), (config.draft, found.draft_passes))
        for one in measured
    ]
    heads = ("model", "positions", "ms", "over one", "MB read", "GB/s", "% of the read")
    title = f"Passes over a cache of {config.max_length} positions, half of it filled"
    shown = grid(heads, passes, title)
    shown.rows[len(found.passes) - 1].end_section = True
    console.print(shown)
    steps = (
        Column("γ", str),
        Column("c", lambda gamma: thousandths(costs.c(gamma))),
        Column("v", lambda gamma: f"{costs.verify_cost(gamma):.2f}"),
        Column("ms to verify", lambda gamma: f"{costs.ms_verify[gamma]:.3f}"),
        Column("ms a guess", lambda gamma: thousandths(costs.ms_draft_step(gamma))),
    )
    title = f"Steps from an empty cache; the target alone takes {costs.ms_target_step:.3f} ms"
    console.print(table(steps, costs.ms_verify, title))
    alone, guessed = found.compile_seconds.values()
    console.print(
        f"Prefill of {config.source_length} tokens: {costs.ms_prefill_target:.2f} ms for the "
        f"target, {costs.ms_prefill_draft:.2f} ms for the draft. Compiling: {alone:.1f} s alone, "
        f"{guessed:.1f} s speculative. An operation that does nothing: {found.operation_us:.2f} "
        f"us. Streaming: {found.host_us:.0f} us more a step."
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
    axes.set_ylim(0)
    title = f"{found.config.target}, {found.dtype}, {environment.device()}"
    axes.set(xlabel="positions", ylabel="ms", title=title)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
