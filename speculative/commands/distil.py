"""`distil`: trains a draft for a target on the target's outputs for texts."""

import argparse
import dataclasses
import functools
import pathlib
from typing import Any

from speculative import disk
from speculative.commands import KINDS, Command, add_options, chosen, option, whole


def _add_distil(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(option, parser)
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="texts like the target's future inputs: .txt, one per line; the sources of a .tsv or "
        ".jsonl; or of tokenised examples, .npz. A decoder-only target continues them, or answers "
        "the messages of a .jsonl with its chat template",
    )
    add("--output DIR", "folder of the draft, for --draft DIR", required=True)
    add("--work_dir DIR", "intermediate files, to resume from (DIR.training)")
    add_options(parser, "--target", "--vocabulary", "--mesh", "--quantize")
    add("--max_minutes MINUTES", "save and stop after this time; exit code 75", float)
    of_files = parser.add_argument_group("with FILE")
    add_options(of_files, "--columns", "--prefix")
    add = functools.partial(option, of_files)
    add("--dim D", "the draft's features (half the target's, at most 1,024)", whole(64, 2**16))
    add("--layers N", "its decoder layers (1)", whole(1, 100))
    add("--keep N", "number of frequent tokens that it may guess (8192)", whole(1, 10**6))
    add("--steps N", "training steps (3000)", whole(25, 10**6))
    add_options(of_files, "--source_length", "--max_length", max_length=None)
    add("--batch_size N", "texts that the target writes at a time (64)", KINDS["--batch_size"])
    add_options(of_files, "--seed")
    of_config = parser.add_argument_group("with a gin file in place of FILE")
    add = functools.partial(option, of_config)
    add("--config FILE.gin", "a file that sets sizes, training and names of tokenised files")
    add("--data_dir DIR", "where the tokenised files are")
    text = "a binding that overrides it, like 'loop.TrainConfig.steps = 100'"
    add("--gin BINDING", text, action="append")
    add("--init_from CHECKPOINT", "start from this draft, not from random weights")


def _distil(options: argparse.Namespace) -> int:
    from speculative import loading
    from speculative.checkpoints.checkpoint import vacant
    from speculative.training import distil
    from speculative.training.loop import UNFINISHED

    output = vacant(options.output)
    disk.writable(output)
    loading.enable_compilation_cache()  # A resumed run needs the same compiled programs.
    work_dir = pathlib.Path(options.work_dir or f"{output}.training")
    values = {"target_dir": options.target, "work_dir": work_dir, "out_dir": output}
    values |= chosen(
        options, ("vocabulary", "max_minutes", "mesh", "quantize")
    )  # A gin file sets the others.
    parameters = _of_config(options, values) if options.config else _of_files(options, values)
    if not distil.distil(**parameters):
        minutes = parameters["max_minutes"]
        print(f"Stopped after --max_minutes {minutes:g}; rerun to resume.")
        return UNFINISHED
    _show(distil.acceptance(work_dir))
    print(f"Written: {output}. Use it: --target {options.target} --draft {output}")
    return 0


def _of_files(options: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    """The parameters of `distil.distil` for the user's own texts."""
    from speculative import chat, checkpoints, loading, progress
    from speculative.models import model_of
    from speculative.training import counting, recipes

    if of_config := [f"--{name}" for name in chosen(options, ("data_dir", "gin", "init_from"))]:
        raise ValueError(f"{', '.join(of_config)}: allowed only with a gin file (--config).")
    if not options.files:
        raise ValueError("There are no texts; give a FILE of them, or a gin file (--config).")
    counting.require(options.files)
    names = [field.name for field in dataclasses.fields(recipes.DraftSettings)]
    settings = recipes.DraftSettings(**chosen(options, names))
    vocabulary = loading.vocabulary(options.target, options.vocabulary)
    target = checkpoints.open(options.target).config
    chats = counting.are_chats(options.files)
    with progress.bar("distil") as on_progress:
        sources = not model_of(target).decoder_only
        how = options.files, vocabulary, options.columns, sources, on_progress
        if chats:
            render = chat.template(vocabulary.special, options.target)
            texts = list(counting.chats(options.files, render, vocabulary, on_progress))
        else:
            texts = list(counting.tokens(*how, options.prefix or ""))
    return common | recipes.of_texts(target, texts, settings, chats)


def _of_config(options: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    """The parameters of `distil.distil` from a gin file."""
    from speculative.training import begun, distil, recipes

    names = [
        "columns",
        "prefix",
        *(field.name for field in dataclasses.fields(recipes.DraftSettings)),
    ]
    if of_files := options.files + [f"--{name}" for name in chosen(options, names)]:
        raise ValueError(
            f"{', '.join(of_files)}: not allowed with --config; set it in the gin file or by --gin."
        )
    if not options.data_dir:
        raise ValueError("A gin file names tokenised files; give their folder (--data_dir).")
    common |= {"data_dir": options.data_dir}
    if options.init_from:
        common["init_from"] = options.init_from
    parameters = recipes.configured(distil.distil, options.config, options.gin or [], common)
    return parameters | {"settings": begun.settings("distil", parameters)}


def _show(accepted: dict[tuple[str, float], list[float]]) -> None:
    """Prints the share accepted of each guess on the held-out texts."""
    from rich.table import Table

    from speculative.reporting import tables

    guesses = max(map(len, accepted.values()), default=0)
    table = Table("held-out texts", *(f"guess {k + 1}" for k in range(guesses)), box=None)
    for (name, temperature), shares in accepted.items():
        table.add_row(f"{name}, T = {temperature:g}", *(f"{share:.3f}" for share in shares))
    tables.CONSOLE.print(table)


COMMANDS = {"distil": Command("train a draft for a target on texts", _add_distil, _distil)}
