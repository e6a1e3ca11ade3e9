"""What `speculative <command>` does: each command's options, checked before anything is loaded.

JAX is imported only by a command that runs.
"""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_LENGTH = 1024  # The longest output; a generation's cache is sized for it.


class Command(NamedTuple):
    """A subcommand: one line of help, its options, and what it does with them."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]  # Gives the exit code; None is 0.


def whole(low: int, high: int) -> Callable[[str], int]:
    """An option's type: a whole number of a range."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if low <= int(text) <= high:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {low} to {high}, not {text!r}"
        )

    return parse


OPTIONS: dict[str, dict[str, Any]] = {
    "--target": {"default": "debian_target", "help": "checkpoint folder or name (debian_target)"},
    "--draft": {
        "help": "checkpoint folder or name; uniform, unigram, bigram, trigram, copy or suffix (the "
        "shipped one of the target)"
    },
    "--vocabulary": {"metavar": "FILE", "help": "SentencePiece model for a checkpoint without one"},
    "--dtype": {
        "choices": ("float32", "bfloat16"),
        "help": "of weights and products (as configured, or as the checkpoint says)",
    },
    "--weights": {"choices": ["random"], "help": "true sizes, no checkpoints"},
    "--seed": {"type": whole(0, 2**32 - 1), "help": "of all random numbers (0, or as configured)"},
    "--max_length": {
        "type": whole(1, MAX_LENGTH),
        "default": 128,
        "metavar": "TOKENS",
        "help": f"where an output is cut, at most {MAX_LENGTH} (128)",
    },
    "--limit": {
        "type": whole(1, 10**6),
        "metavar": "N",
        "help": "texts of each task or row (all, or as configured)",
    },
    "--output_dir": {"metavar": "DIR", "help": "where results are written (%(default)s)"},
    "--gin": {
        "action": "append",
        "default": [],
        "metavar": "BINDING",
        "help": "a binding that overrides each row, like 'RowConfig.gamma = 3'",
    },
}
"""Options that several commands have."""


def add_options(parser: argparse._ActionsContainer, *names: str, **defaults: Any) -> None:
    """Adds some of `OPTIONS`, with other defaults by name without the dashes."""
    for name in names:
        key = name.removeprefix("--")
        changed = {"default": defaults[key]} if key in defaults else {}
        parser.add_argument(name, **OPTIONS[name] | changed)
