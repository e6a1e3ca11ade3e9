"""Prints and plots the benchmark of a pair."""

import pathlib

from matplotlib.figure import Figure
from rich.console import Console

from speculative import disk
from speculative.reporting.tables import CONSOLE, Column, grid, table, thousandths
from speculative.rows import environment
from speculative.studies.bench import Batches, Bench


def write(found: Bench | Batches, record: pathlib.Path, image: pathlib.Path) -> None:
    """Writes measurements and their plot, and prints them even if the plot fails."""
    disk.write(record, found.to_json() + "\n")
    try:
        with disk.written(image) as part:
            plot(found).savefig(part, dpi=150)
    finally:
        show(found) if isinstance(found, Bench) else show_batches(found)
    print(f"Written: {record} and {image}.")


def show_batches(found: Batches, console: Console = CONSOLE) -> None:
    """Prints tokens per second by batch size, both ways, and the speed-up."""
    config = found.config
    console.print(
        f"{config.target} with {config.draft}, T = {config.temperature}, on "
        f"{environment.device()}: {found.texts} texts, {found.tokens_per_call:.2f} tokens per call."
    )
    one = found.batches[0]
    columns = (
        Column("batch", lambda batch: str(batch.batch_size)),
        Column("tokens/s alone", lambda batch: f"{found.rate(batch, 0):,.0f}"),
        Column("over batch 1", lambda batch: f"{found.rate(batch, 0) / found.rate(one, 0):.2f}"),
        Column("with draft", lambda batch: f"{found.rate(batch, 1):,.0f}"),
        Column("over batch 1", lambda batch: f"{found.rate(batch, 1) / found.rate(one, 1):.2f}"),
        Column("speed-up", lambda batch: f"{found.speedup(batch):.2f}"),
    )
    console.print(table(columns, found.batches))


def show(found: Bench, console: Console = CONSOLE) -> None:
    """Prints the measurements as tables."""
    config, costs = found.config, found.costs
    console.print(
        f"{config.target} with {config.draft}, {found.model.precision}, on "
        f"{environment.device()}: a streaming read reaches {found.bandwidth / 1e9:.1f} GB/s."
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
    shown = grid(heads, passes)
    shown.rows[len(found.passes) - 1].end_section = True
    console.print(f"\nPasses over a cache of {config.max_length} positions, half of it filled:")
    console.print(shown)
    steps = (
        Column("γ", str),
        Column("c", lambda gamma: thousandths(costs.c(gamma))),
        Column("v", lambda gamma: f"{costs.verify_cost(gamma):.2f}"),
        Column("ms to verify", lambda gamma: f"{costs.ms_verify[gamma]:.3f}"),
        Column("ms per guess", lambda gamma: thousandths(costs.ms_draft_step(gamma))),
    )
    step = f"{costs.ms_target_step:.3f}"
    console.print(f"\nSteps from an empty cache; the target alone takes {step} ms:")
    console.print(table(steps, costs.ms_verify))
    console.print(
        f"\nPrefill of {config.random_length} tokens: {costs.ms_prefill_target:.2f} ms for the "
        f"target, {costs.ms_prefill_draft:.2f} ms for the draft."
    )


def plot(found: Bench | Batches) -> Figure:
    """Plots a target pass's time over its positions, above the floor that reading sets.

    For batches, it plots tokens per second over their sizes, both ways.
    """
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes, config, device = figure.subplots(), found.config, environment.device()
    if isinstance(found, Bench):
        sizes = [one.width for one in found.passes]
        floor = [1e3 * one.bytes / found.bandwidth for one in found.passes]
        axes.fill_between(sizes, floor, color="0.88", label="reading parameters and caches")
        axes.plot(sizes, [one.ms for one in found.passes], "o-", color="#0072b2", label="a pass")
        title = f"{config.target}, {found.model.precision}, {device}"
        axes.set(xlabel="positions", ylabel="ms")
    else:
        sizes = [batch.batch_size for batch in found.batches]
        for way, (name, color) in enumerate(
            (("target alone", "#d55e00"), ("with draft", "#0072b2"))
        ):
            rates = [found.rate(batch, way) for batch in found.batches]
            axes.plot(sizes, rates, "o-", color=color, label=name)
        title = f"{config.target} with {config.draft}, {device}"
        axes.set(xlabel="batch size", ylabel="tokens per second")
    axes.set_title(title, parse_math=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.set_ylim(0)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
