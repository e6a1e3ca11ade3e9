"""`convert` and `inspect`: checkpoints."""

import argparse
import functools

from speculative.commands import Command, option, whole


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="checkpoint folder, gs://bucket/folder, name, or Hugging Face id")
    add("destination", help="the folder to create")
    add = functools.partial(option, parser)
    add("--to", "format to write", ("native", "t5x", "huggingface"), required=True)
    text = "number format to store, int8 only in native (the one that loses nothing)"
    add("--dtype", text, ("float32", "bfloat16", "int8"))
    add("--vocabulary FILE", "SentencePiece model to store with the weights")
    text = "make a faster draft, which guesses only the N most frequent tokens of --texts"
    add("--keep N", text, whole(1, 2**31 - 1))
    text = "texts like those that the target writes, as for speculative count"
    add("--texts FILE", text, nargs="+")


def _convert(options: argparse.Namespace) -> None:
    from speculative import checkpoints

    if (options.keep is None) != (options.texts is None):
        raise ValueError("--keep and --texts belong together; give both or neither.")
    kept = None
    if options.texts:
        from speculative import loading, progress
        from speculative.training import counting

        counting.require(options.texts)
        vocabulary = loading.vocabulary(options.source, options.vocabulary)
        with progress.bar("convert") as on_progress:
            texts = counting.tokens(options.texts, vocabulary, on_progress=on_progress)
            kept = counting.most_frequent(texts, options.keep, vocabulary.size)
    args = options.source, options.destination, options.to, options.dtype, options.vocabulary
    made = checkpoints.convert(*args, tokens=kept)
    print(f"Written: {made.location} ({made.format}, {made.parameters / 1e6:.1f} M parameters).")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="checkpoint folder, gs://bucket/folder, name, or hub id")


def _inspect(options: argparse.Namespace) -> None:
    from rich.table import Table

    from speculative import checkpoints
    from speculative.reporting import tables

    table = Table(show_header=False, box=None)
    for name, value in checkpoints.describe(checkpoints.open(options.path)).items():
        table.add_row(name, value)
    tables.CONSOLE.print(table, soft_wrap=True)


COMMANDS = {
    "convert": Command("write a checkpoint in another format", _add_convert, _convert),
    "inspect": Command("describe a checkpoint", _add_inspect, _inspect),
}
