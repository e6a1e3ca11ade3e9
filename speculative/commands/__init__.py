"""What `speculative <command>` does: each command's options, checked before anything is loaded.

JAX is imported only by a command that runs.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from speculative import checks
from speculative.settings import Settings

SETTINGS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
"""The fields of `Settings`, with the values they have where nothing else is said."""

OF_RUN = {"example", "truncate", "logprobs", "processors", "batch_size"}
"""Those of all texts alike, which lines of results do not tell."""

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
        "help": "checkpoint folder or name; uniform, unigram, bigram, trigram, copy or suffix; a "
        "table of speculative count, FILE.npz; a checkpoint mixed with a lookup, NAME+copy or "
        "NAME+suffix (the shipped one of the target)"
    },
    "--vocabulary": {
        "metavar": "FILE",
        "help": "SentencePiece model for a checkpoint without one, or 'bytes' (ByT5)",
    },
    "--dtype": {
        "choices": ("float32", "bfloat16"),
        "help": "of weights and products (as configured, or as the checkpoint says)",
    },
    "--task": {"metavar": "NAME", "help": "the task whose prefix, metric and texts are taken"},
    "--data_file": {
        "metavar": "FILE",
        "help": "texts: .tsv, .jsonl, .txt, two parallel files with a comma between, or tfds:NAME",
    },
    "--columns": {
        "metavar": "NAMES",
        "help": "SOURCE,REFERENCE or SOURCE, in .tsv, .jsonl or TFDS",
    },
    "--prefix": {"metavar": "TEXT", "help": "words to put before each text (none, or the task's)"},
    "--metric": {
        "metavar": "NAME",
        "help": "bleu, rouge, rougeL, rougeLsum (or the task's)",
    },
    "--module": {
        "metavar": "MODULE",
        "help": "import it first: it registers tasks (speculative.tasks.register, or seqio)",
    },
    "--gamma": {
        "type": whole(1, checks.MAX_GAMMA),
        "metavar": "N",
        "help": "guesses a step (5, or as configured)",
    },
    "--temperature": {"type": float, "metavar": "T", "help": "0 is argmax (0, or as configured)"},
    "--top_k": {"type": int, "metavar": "K", "help": "the K likeliest tokens; 0 is all (0)"},
    "--top_p": {"type": float, "metavar": "P", "help": "nucleus, in (0, 1] (1)"},
    "--min_p": {
        "type": float,
        "metavar": "P",
        "help": "tokens of at least P times the greatest probability, in [0, 1] (0, all)",
    },
    "--verification": {
        "metavar": "RULE",
        "help": "how guesses are verified, a name of speculative.decoding.rules.RULES (token)",
    },
    "--lenience": {
        "type": float,
        "metavar": "L",
        "help": "in (0, 1]; below 1 more guesses are accepted, but outputs are not exact (1)",
    },
    "--source_length": {
        "type": whole(1, checks.MAX_TOKENS),
        "metavar": "S",
        "help": "tokens of a source (as configured, or 64)",
    },
    "--batch_size": {
        "type": whole(1, checks.MAX_BATCH),
        "metavar": "N",
        "help": "texts that are decoded together, each as it would be alone (1, in evaluate 16)",
    },
    "--topology": {
        "default": "v4-8",
        "metavar": "NAME",
        "help": "a TPU, of which one chip is used: v4-8, v5e-1, v5p-8, v6e-1, or present, this "
        "machine's device (v4-8)",
    },
    "--family": {
        "metavar": "NAME",
        "help": "other models for a table: T5 v1.0 of 11B parameters (v1_0) or 3B (v1_0_3b), whose "
        "public weights know the paper's tasks",
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
