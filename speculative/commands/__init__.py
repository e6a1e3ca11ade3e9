"""The commands of `speculative`: their options are checked before anything is loaded.

JAX is imported only when a command runs.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from speculative import checks
from speculative.settings import Settings

SETTINGS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
"""The fields of `Settings` and their defaults."""

OF_RUN = {"example", "source_length", "logprobs", "processors", "batch_size", "show_special"}
"""Fields that are the same for all texts, which lines of results leave out."""


class Command(NamedTuple):
    """A subcommand: one line of help, its options, and the function that runs it."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]  # Returns the exit code; None is 0.


def whole(low: int, high: int) -> Callable[[str], int]:
    """An option's type: a whole number in a range."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if low <= int(text) <= high:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {low} to {high}, not {text!r}"
        )

    return parse


AUTO = "auto"  # In place of a tree's number of guesses; see `rows.usual_tree`.


def nodes(text: str) -> int | str:
    """The type of a tree's number of guesses: a whole number or `AUTO`."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        return text if text == AUTO else whole(0, checks.MAX_NODES)(text)
    message = f"must be a whole number from 0 to {checks.MAX_NODES} or {AUTO}, not {text!r}"
    raise argparse.ArgumentTypeError(message)


def mesh(text: str) -> str:
    """The type of a mesh's axes: a text like ``data:2,model:4``."""
    try:
        checks.mesh("", text)
    except checks.SettingError as error:
        raise argparse.ArgumentTypeError(str(error).strip().rstrip(".")) from None
    return text


OPTIONS = {
    "--target": "checkpoint folder or name (debian_target)",
    "--draft": "checkpoint folder or name; uniform, unigram, bigram, trigram, copy or suffix; a "
    "table made by speculative count, FILE.npz; a checkpoint mixed with a lookup, NAME+copy or "
    "NAME+suffix (the target's bundled draft)",
    "--vocabulary FILE": "SentencePiece model or tokenizer.json for a checkpoint without one, or "
    "'bytes' (ByT5)",
    "--dtype": "format of weights and products (as configured; or bfloat16 on an accelerator if "
    "all weights are stored in it, and float32 otherwise)",
    "--quantize": "round the target's kernels to int8 and take the result as the target; "
    "int8-activations also rounds the inputs of products (none)",
    "--quantize_draft": "the same for the draft (int8-activations on a CPU, none elsewhere)",
    "--mesh AXES": "devices that share the target: model:4 puts a quarter of each kernel on each "
    "of four, data:2,model:4 also splits each batch in half (one device)",
    "--draft_mesh AXES": "the same for the draft, on the same devices (each has all of it)",
    "--task NAME": "the task whose prefix, metric and texts are used",
    "--data_file [TASK=]FILE": "texts of a task: .tsv, .jsonl, .txt, two parallel files separated "
    "by a comma, or tfds:NAME",
    "--columns NAMES": "SOURCE,REFERENCE or SOURCE, in .tsv, .jsonl or TFDS",
    "--prefix TEXT": "words to put before each text (none, or the task's)",
    "--metric NAME": "bleu, rouge, rougeL, rougeLsum (or the task's)",
    "--module MODULE": "import it first to register tasks (speculative.tasks.register, or seqio)",
    "--gamma N": "guesses per step (5, or as configured)",
    "--temperature T": "0 is argmax (0, or as configured)",
    "--top_k K": "keep the K likeliest tokens; 0 keeps all (0)",
    "--top_p P": "nucleus, in (0, 1] (1)",
    "--min_p P": "keep tokens of at least P times the greatest probability, in [0, 1] (0, all)",
    "--verification RULE": "how guesses are verified, a name in speculative.decoding.rules.RULES "
    "(token)",
    "--tree N": "guesses in a step's tree, whose depth is gamma, at T = 0 or with --verification "
    "coupled; 0 is a chain, auto is as many guesses as the device verifies in about the time that "
    "it takes for a few (0)",
    "--lenience L": "in (0, 1]; below 1 more guesses are accepted, but outputs are not exact (1)",
    "--source_length S": "number of tokens to which longer texts are cut, or that random sources "
    "have (as configured; otherwise texts are not cut, and random sources have 64)",
    "--batch_size N": "texts decoded together, each as if alone (1; in evaluate 16)",
    "--topology NAME": "a TPU slice, of which one chip is used, or several with --mesh: v4-8, "
    "v4-32, v5e-1, v5p-8, v6e-1 and others, or present, this machine's devices (v4-8)",
    "--family NAME": "other models for a table: T5 v1.0 of 11B parameters (v1_0) or 3B (v1_0_3b), "
    "whose public weights know the paper's tasks",
    "--weights": "use random weights of the true sizes, without checkpoints",
    "--seed": "seed of all random numbers (0, or as configured)",
    "--max_length TOKENS": "length at which outputs are cut (128)",
    "--limit N": "texts per task or row (all, or as configured)",
    "--output_dir DIR": "where results are written (%(default)s)",
    "--gin BINDING": "a binding that overrides each row, like 'RowConfig.gamma = 3'",
}
"""Options that several commands share, with their help texts."""

KINDS: dict[str, Any] = {
    "--dtype": ("float32", "bfloat16"),
    **dict.fromkeys(("--quantize", "--quantize_draft"), ("none", "int8", "int8-activations")),
    **dict.fromkeys(("--mesh", "--draft_mesh"), mesh),
    "--gamma": whole(1, checks.MAX_GAMMA),
    "--tree": nodes,
    "--top_k": int,
    **dict.fromkeys(("--temperature", "--top_p", "--min_p", "--lenience"), float),
    **dict.fromkeys(("--source_length", "--max_length"), whole(1, checks.MAX_TOKENS)),
    "--batch_size": whole(1, checks.MAX_BATCH),
    "--weights": ("random",),
    "--seed": whole(0, 2**32 - 1),
    "--limit": whole(1, 10**6),
}
"""Types of options whose values are not texts, or the values that they may have."""

DEFAULTS = {"target": "debian_target", "topology": "v4-8", "max_length": 128, "gin": []}


def option(
    parser: argparse._ActionsContainer, shown: str, help_text: str, kind: Any = str, **more: Any
) -> None:
    """Adds an option with a value, shown as `--name VALUE`; for its kind see `KINDS`."""
    name, _, metavar = shown.partition(" ")
    more["choices" if isinstance(kind, tuple) else "type"] = kind
    parser.add_argument(name, metavar=metavar or None, help=help_text, **more)


def add_options(parser: argparse._ActionsContainer, *names: str, **defaults: Any) -> None:
    """Adds some of `OPTIONS`; `defaults`, by name without dashes, override `DEFAULTS`."""
    known = {shown.partition(" ")[0]: (shown, text) for shown, text in OPTIONS.items()}
    for name in names:
        more = {"default": (DEFAULTS | defaults).get(name.removeprefix("--"))}
        if name in ("--data_file", "--gin"):
            more["action"] = "append"
        option(parser, *known[name], KINDS.get(name, str), **more)


def chosen(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """The named values of a namespace that are set."""
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}
