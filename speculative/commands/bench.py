"""`bench`: what a pair's steps cost, and what the device would allow."""

import argparse
import pathlib

from speculative.commands import Command, add_options, whole


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--target", "--draft", "--weights", "--dtype", "--vocabulary")
    add = parser.add_argument
    add(
        "--widths",
        type=whole(1, 1024),
        nargs="+",
        metavar="L",
        help="positions of the passes that are timed (1 to 32)",
    )
    add("--source_length", type=whole(1, 10**5), default=64, metavar="S", help="(64)")
    add(
        "--cache_length",
        type=whole(1, 10**5),
        default=64,
        metavar="T",
        help="positions of the caches, half of them filled (64)",
    )
    add("--output_dir", metavar="DIR", help="(results/bench/ and the target's name)")


def _bench(options: argparse.Namespace) -> None:
    from speculative.loading import default_draft
    from speculative.reporting import bench
    from speculative.rows.config import RowConfig

    random = options.weights is not None
    config = RowConfig(
        task="debian_ende",
        target=options.target,
        draft=default_draft(options.target, random) if options.draft is None else options.draft,
        temperature=0.0,
        dtype=options.dtype,
        checkpoints=options.weights,
        vocabulary=options.vocabulary,
        source_length=options.source_length,
        max_length=options.cache_length,
    )
    folder = options.output_dir or f"results/bench/{pathlib.Path(options.target).name}"
    bench.run(config, options.widths, pathlib.Path(folder))


COMMANDS = {
    "bench": Command("time a pair's steps against what the device allows", _add_bench, _bench)
}
