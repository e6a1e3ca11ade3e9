"""`demo`: the speed-up on the shipped prompts, measured and shown."""

import argparse
import pathlib

from speculative.commands import PAIR, Command, add_options


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *PAIR, "--output_dir", "--limit", seed=0, output_dir="results/demo")


def _demo(options: argparse.Namespace) -> None:
    from speculative.reporting import demo

    names = ("target", "draft", "dtype", "vocabulary", "seed", "max_length")
    settings = {name: getattr(options, name) for name in names}
    demo.run(pathlib.Path(options.output_dir), num_examples=options.limit, **settings)


COMMANDS = {
    "demo": Command("measure the speed-up on the shipped prompts and show it", _add_demo, _demo),
}
