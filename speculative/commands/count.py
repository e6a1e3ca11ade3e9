"""`count`: tables from text, for drafts that need no training."""

import argparse
import functools

from speculative.commands import Command, add_options, chosen, option, whole

NGRAMS, OUTPUTS = "ngrams", "outputs"


def _add_count(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(option, parser)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="texts like those that the target writes: .txt, one per line; the references of a "
        ".tsv or .jsonl; or the targets of tokenised examples, .npz",
    )
    text = "n-grams for unigram, bigram and trigram, or past outputs for suffix (ngrams)"
    add("--kind", text, (NGRAMS, OUTPUTS), default=NGRAMS)
    add_options(parser, "--target", "--vocabulary", "--columns")
    parser.add_argument(
        "--sources", action="store_true", help="use the sources, not the references"
    )
    add(
        "--tokens N",
        "the most tokens counted or kept, sampled evenly from the texts; this bounds memory (50 "
        "million for n-grams, 300,000 for outputs)",
        whole(1, 10**9),
    )
    add("--order N", "tokens of the longest n-grams (3)", whole(1, 3))
    add("--width N", "followers kept per context (256)", whole(1, 10**5))
    add("--min_count N", "leave out rarer n-grams (1)", whole(1, 10**9))
    add("--output FILE.npz", "file of the draft, for --draft FILE.npz", required=True)


def _count(options: argparse.Namespace) -> None:
    from speculative import disk, loading, progress
    from speculative.training import counting

    of_ngrams = chosen(options, ("order", "width", "min_count"))
    if options.kind == OUTPUTS and of_ngrams:
        raise ValueError(f"--{min(of_ngrams)} is for n-grams; leave it out with --kind {OUTPUTS}.")
    if not options.output.endswith(".npz"):
        raise ValueError(f"--output must end in .npz, which marks a draft, not {options.output}.")
    counting.require(options.files)
    vocabulary = loading.vocabulary(options.target, options.vocabulary)
    disk.writable(options.output)
    sources, columns = options.sources, options.columns
    with progress.bar("count") as on_progress:
        texts = counting.sample(
            counting.tokens(options.files, vocabulary, columns, sources, on_progress),
            options.tokens or counting.MOST[options.kind],
        )
        args = options.output, texts, vocabulary, options.kind, on_progress
        summary = counting.write(*args, **of_ngrams)
    print(f"Written: {options.output} ({summary}).")


COMMANDS = {"count": Command("make a draft from text, without training", _add_count, _count)}
