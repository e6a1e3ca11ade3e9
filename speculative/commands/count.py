"""`count`: tables from text, for drafts that need no training."""

import argparse
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from speculative import disk
from speculative.commands import Command, add_options, whole

if TYPE_CHECKING:
    import numpy as np

    from speculative.vocabulary import Vocabulary

NGRAMS, OUTPUTS = "ngrams", "outputs"


def _add_count(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="texts like those that the target writes: .txt, one a line; the references of a .tsv "
        "or .jsonl; or the targets of tokenised examples, .npz",
    )
    add(
        "--kind",
        choices=(NGRAMS, OUTPUTS),
        default=NGRAMS,
        help="n-grams for unigram, bigram and trigram, or past outputs for suffix (ngrams)",
    )
    add_options(parser, "--target", "--vocabulary", "--columns")
    add("--sources", action="store_true", help="take the sources, not the references")
    add("--order", type=whole(1, 8), default=3, help="tokens of the longest n-grams (3)")
    add(
        "--width",
        type=whole(1, 10**5),
        default=256,
        metavar="N",
        help="followers that are kept of what came before (256)",
    )
    add(
        "--min_count",
        type=whole(1, 10**9),
        default=1,
        metavar="N",
        help="n-grams that are rarer are left out (1)",
    )
    add(
        "--tokens",
        type=whole(1, 10**9),
        default=300_000,
        metavar="N",
        help="of past outputs that are kept, an even sample (300000)",
    )
    add("--output", required=True, metavar="FILE.npz", help="then a draft: --draft FILE.npz")


def _count(options: argparse.Namespace) -> None:
    from speculative import checkpoints
    from speculative.drafts import count_ngrams, ngram, suffix
    from speculative.loading import Weights

    output = pathlib.Path(options.output)
    if output.suffix != ".npz":
        raise ValueError(f"--output must end in .npz, by which drafts are known, not {output}.")
    checkpoint = checkpoints.open(options.target)
    weights = Weights(options.target, checkpoint.config, checkpoint)
    vocabulary = weights.vocabulary(options.vocabulary)
    disk.writable(output)
    rows = [row for file in options.files for row in _rows(file, options, vocabulary)]
    tokens = sum(map(len, rows))
    if options.kind == NGRAMS:
        table = count_ngrams(rows, options.order, vocabulary.size, options.width, options.min_count)
        ngram.TABLE.save(output, vocabulary, table)
        made = f"{len(table['count']):,} n-grams of {len(table['total']):,} contexts, from"
    else:
        kept = _sample(rows, options.tokens)
        suffix.save(output, kept, vocabulary)
        made = f"{len(kept):,} outputs of {sum(map(len, kept)):,} tokens, of"
    size = output.stat().st_size / 1e6
    print(f"Written: {output} ({made} {tokens:,} tokens of {len(rows):,} texts; {size:.2f} MB).")


def _rows(
    file: str, options: argparse.Namespace, vocabulary: "Vocabulary"
) -> Iterator["np.ndarray"]:
    """The texts of a file as tokens, each with the end of sequence."""
    from rich.console import Console
    from rich.progress import track

    from speculative.tasks.prompts import read_pairs
    from speculative.training import examples

    sources = options.sources
    if file.endswith(".npz"):
        yield from (source if sources else target for source, target in examples.load(file))
        return
    pairs = read_pairs(file, options.columns)
    alone = not any(reference for _, reference in pairs)
    console = Console(stderr=True)
    shown = track(pairs, file, console=console, transient=True, disable=not console.is_terminal)
    for source, reference in shown:
        if text := source if sources or alone else reference:
            yield vocabulary.encode(text)


def _sample(rows: Sequence["np.ndarray"], tokens: int) -> list["np.ndarray"]:
    """Whole texts, evenly drawn, of so many tokens at most."""
    share = min(1.0, tokens / max(1, sum(map(len, rows))))
    kept, room = [], 0.0
    for row in rows:
        room += share * len(row)
        if len(row) <= room:
            room -= len(row)
            kept.append(row)
    if not kept:
        raise ValueError(f"No text has at most {tokens} tokens; raise --tokens.")
    return kept


COMMANDS = {"count": Command("make a draft that needs no training from text", _add_count, _count)}
