"""`bench`: what a pair's steps cost, and what the device would allow."""

import argparse
import pathlib

from speculative.commands import DTYPES, Command, whole


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", default="debian_target", help="checkpoint folder or name (%(default)s)")
    add("--draft", help="likewise, or a model-free draft (the shipped one of the target)")
    add("--weights", choices=["random"], help="of the sizes that target and draft name")
    add("--dtype", choices=DTYPES, help="of weights and products (as the checkpoints say)")
    add("--vocabulary", metavar="FILE", help="SentencePiece model, where a checkpoint has none")
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
    from rich.console import Console

    from speculative.experiments import bench
    from speculative.experiments.settings import RowConfig
    from speculative.pair import DRAFTS

    config = RowConfig(
        task="debian_ende",
        target=options.target,
        draft=options.draft or DRAFTS.get(options.target, "debian_draft"),
        temperature=0.0,
        dtype=options.dtype,
        checkpoints=options.weights,
        vocabulary=options.vocabulary,
        source_length=options.source_length,
        max_length=options.cache_length,
    )
    folder = pathlib.Path(
        options.output_dir or f"results/bench/{pathlib.Path(options.target).name}"
    )
    bench.run(config, options.widths or bench.WIDTHS, folder, Console())
    print(f"Written: {folder / 'bench.json'} and {folder / 'bench.png'}.")


COMMANDS = {
    "bench": Command("time a pair's steps beside what the device allows", _add_bench, _bench)
}
