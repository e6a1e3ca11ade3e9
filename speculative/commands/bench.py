"""`bench`: what a pair's steps cost, and what the device would allow."""

import argparse
import dataclasses
import pathlib

from speculative import checks
from speculative.commands import Command, add_options, rows, whole


def _add_bench(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add = parser.add_argument
    add(
        "--widths",
        type=whole(1, 1024),
        nargs="+",
        metavar="L",
        help="positions of the passes that are timed (1 to 32)",
    )
    add_options(parser, "--source_length")
    add(
        "--batch_sizes",
        type=lambda text: [whole(1, checks.MAX_BATCH)(size) for size in text.split(",")],
        metavar="N[,N]",
        help="decode texts in batches of these sizes instead, with and without the draft",
    )
    add("--output_dir", metavar="DIR", help="(results/bench/ and the target's name)")


def _bench(options: argparse.Namespace) -> None:
    from speculative.reporting import bench

    _, config = rows.row(options)
    folder = pathlib.Path(options.output_dir or f"results/bench/{pathlib.Path(config.target).name}")
    if options.batch_sizes:
        bench.run_batches(config, options.batch_sizes, folder)
        return
    config = dataclasses.replace(
        config, source_length=options.source_length or 64, max_length=options.max_length or 64
    )
    bench.run(config, options.widths, folder)


COMMANDS = {
    "bench": Command("time a pair's steps against what the device allows", _add_bench, _bench)
}
