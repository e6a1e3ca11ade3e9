"""`distil`: a draft for a target, trained on what it writes for texts of one's own."""

import argparse
import dataclasses
import pathlib

from speculative import checks, disk
from speculative.commands import Command, add_options, whole


def _add_distil(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="texts like those that the target is to be given: .txt, one a line; the sources of a "
        ".tsv or .jsonl; or of tokenised examples, .npz. A decoder-only target continues them",
    )
    add("--output", required=True, metavar="DIR", help="then a draft: --draft DIR")
    add("--work_dir", metavar="DIR", help="what is between, to go on with (DIR.training)")
    add_options(parser, "--target", "--vocabulary", "--columns", "--prefix")
    dims, most = whole(64, 2**16), whole(1, 10**6)
    add("--dim", type=dims, metavar="D", help="the draft's features (half the target's, to 1,024)")
    add("--layers", type=whole(1, 100), metavar="N", help="its decoder layers (1)")
    add("--keep", type=most, metavar="N", help="the frequent tokens that it may guess (8192)")
    add("--steps", type=whole(25, 10**6), metavar="N", help="of training (3000)")
    add_options(parser, "--max_length")
    add(
        "--batch_size",
        type=whole(1, checks.MAX_BATCH),
        metavar="N",
        help="texts that the target writes at a time (64)",
    )
    add_options(parser, "--seed")
    add("--max_minutes", type=float, metavar="MINUTES", help="then save and stop; exit code 75")


def _distil(options: argparse.Namespace) -> int:
    from speculative import loading, progress
    from speculative.checkpoints.checkpoint import vacant
    from speculative.training import counting, own
    from speculative.training.loop import UNFINISHED

    output = vacant(options.output)
    disk.writable(output)
    counting.require(options.files)
    chosen = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(own.Settings)
    }
    settings = own.Settings(**{k: v for k, v in chosen.items() if v is not None})
    vocabulary = loading.vocabulary(options.target, options.vocabulary)
    loading.enable_compilation_cache()  # A resumed run needs the same compiled programs.
    work_dir = pathlib.Path(options.work_dir or f"{output}.training")
    with progress.bar("distil") as on_progress:
        sources = not own.decoder_only(options.target)
        given = options.files, vocabulary, options.columns, sources, on_progress
        texts = list(counting.tokens(*given, options.prefix or ""))
    if not own.train(
        options.target, texts, output, work_dir, settings, options.vocabulary, options.max_minutes
    ):
        print(f"Stopped after --max_minutes {options.max_minutes:g}; the same command goes on.")
        return UNFINISHED
    _show(own.acceptance(work_dir))
    print(f"Written: {output}. Use it: --target {options.target} --draft {output}")
    return 0


def _show(accepted: dict[float, list[float]]) -> None:
    """Prints what share of each guess was accepted of the held-out texts."""
    from rich.console import Console
    from rich.table import Table

    guesses = len(next(iter(accepted.values())))
    table = Table("held-out texts", *(f"guess {k + 1}" for k in range(guesses)), box=None)
    for temperature, shares in accepted.items():
        table.add_row(f"T = {temperature:g}", *(f"{share:.3f}" for share in shares))
    Console().print(table)


COMMANDS = {"distil": Command("train a draft for a target on texts", _add_distil, _distil)}
