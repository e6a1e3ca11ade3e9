"""`count`: tables from text, for drafts that need no training."""

import argparse

from speculative.commands import Command, add_options, whole

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
    add(
        "--tokens",
        type=whole(1, 10**9),
        metavar="N",
        help="the most that are counted or kept, an even sample of the texts; this bounds memory "
        "(50 million for n-grams, 300,000 for outputs)",
    )
    add("--order", type=whole(1, 3), metavar="N", help="tokens of the longest n-grams (3)")
    add(
        "--width",
        type=whole(1, 10**5),
        metavar="N",
        help="followers that are kept of what came before (256)",
    )
    add(
        "--min_count",
        type=whole(1, 10**9),
        metavar="N",
        help="n-grams that are rarer are left out (1)",
    )
    add("--output", required=True, metavar="FILE.npz", help="then a draft: --draft FILE.npz")


def _count(options: argparse.Namespace) -> None:
    from speculative import disk, loading, progress
    from speculative.training import counting

    asked = {name: getattr(options, name) for name in ("order", "width", "min_count")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if options.kind == OUTPUTS and asked:
        raise ValueError(f"--{min(asked)} is for n-grams; leave it out with --kind {OUTPUTS}.")
    if not options.output.endswith(".npz"):
        said = f"by which drafts are known, not {options.output}"
        raise ValueError(f"--output must end in .npz, {said}.")
    counting.require(options.files)
    vocabulary = loading.vocabulary(options.target, options.vocabulary)
    disk.writable(options.output)
    sources, columns = options.sources, options.columns
    with progress.bar("count") as on_progress:
        texts = counting.sample(
            counting.tokens(options.files, vocabulary, columns, sources, on_progress),
            options.tokens or counting.MOST[options.kind],
        )
        if options.kind == OUTPUTS:
            said = counting.keep(options.output, texts, vocabulary)
        else:
            said = counting.count(options.output, texts, vocabulary, on_progress, **asked)
    print(f"Written: {options.output} ({said}).")


COMMANDS = {"count": Command("make a draft that needs no training from text", _add_count, _count)}
