"""`bench`: times a pair's steps and compares them with the device's limits."""

import argparse
import dataclasses
import functools
import pathlib

from speculative.commands import KINDS, Command, option, rows, whole


def _add_bench(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add = functools.partial(option, parser)
    add("--widths L", "positions per timed pass (1 to 32)", whole(1, 1024), nargs="+")
    add(
        "--batch_sizes N[,N]",
        "decode texts in batches of these sizes instead, with and without the draft",
        lambda text: [KINDS["--batch_size"](size) for size in text.split(",")],
    )
    add("--output_dir DIR", "folder for the results (results/bench/ and the target's name)")


def _bench(options: argparse.Namespace) -> None:
    from speculative import disk, progress
    from speculative.reporting import bench as report
    from speculative.studies import bench, sweep

    _, config = rows.row(options)
    folder = pathlib.Path(options.output_dir or f"results/bench/{pathlib.Path(config.target).name}")
    if options.batch_sizes:
        sizes = sorted({1, *options.batch_sizes})
        name, measure = "batches", functools.partial(sweep.batches, config, sizes)
    else:
        lengths = {"source_length": options.source_length, "max_length": options.max_length}
        config = dataclasses.replace(config, **{name: n or 64 for name, n in lengths.items()})
        widths = sorted({1, *(options.widths or bench.WIDTHS)})
        resolved = bench.resolve(config, widths)
        name, measure = "bench", functools.partial(bench.bench, config, widths, resolved)
    record, image = (disk.writable(folder / f"{name}.{kind}") for kind in ("json", "png"))
    with progress.bar("bench") as on_progress:
        measured = measure(on_progress)
    report.write(measured, record, image)


COMMANDS = {"bench": Command("time a pair's steps against the device's limits", _add_bench, _bench)}
