"""What `speculative <command>` does: each command's options, checked before anything is loaded.

JAX is imported only by a command that runs.
"""

import argparse
import dataclasses
from collections.abc import Callable

DTYPES = ("float32", "bfloat16")
MAX_GAMMA = 64
MAX_LENGTH = 1024
"""The longest output; a generation's cache is sized for it."""
MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, its options, and what it does with them.

    `run` gives the exit code, 0 where it gives none.
    """

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


def whole(low: int, high: int) -> Callable[[str], int]:
    """An option's type: a whole number of a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, not {text!r}"
            )
        return value

    return parse


def add_pair(parser: argparse.ArgumentParser) -> None:
    """The options that the commands that decode have."""
    add = parser.add_argument
    add("--target", default="debian_target", help="checkpoint folder or name (%(default)s)")
    add(
        "--draft",
        help="checkpoint folder or name; uniform, unigram, bigram, trigram, copy or suffix (the "
        "shipped one of the target)",
    )
    add("--vocabulary", metavar="FILE", help="SentencePiece model, where a checkpoint has none")
    add("--dtype", choices=DTYPES, help="of weights and products (as the checkpoints say)")
    add("--seed", type=whole(0, MAX_SEED), default=0, help="of all random numbers (0)")
    add(
        "--max_length",
        type=whole(1, MAX_LENGTH),
        default=128,
        metavar="TOKENS",
        help=f"where an output is cut, at most {MAX_LENGTH} (128)",
    )
