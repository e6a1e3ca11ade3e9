"""Counts n-grams of training targets, or of a model's outputs, into a table for n-gram drafts.

python scripts/count_ngrams.py data/tokenized/debian_*_train.npz --order=3 \
    --vocabulary=speculative/assets/debian.model --output=ngrams.npz

The files are those of scripts/export_tokenized.py, or the texts that distillation writes.
"""

import argparse
import pathlib

from speculative.drafts import count_ngrams, ngram
from speculative.training import examples
from speculative.vocabulary import open_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the n-grams of token files.")
    parser.add_argument("files", type=pathlib.Path, nargs="+", help=".npz files of token ids")
    parser.add_argument("--order", type=int, default=3, help="tokens of the longest n-grams")
    parser.add_argument("--vocabulary", required=True, help="the files' SentencePiece model")
    parser.add_argument("--extra_ids", type=int, default=0, help="sentinels after it, 100 for T5")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--width", type=int, default=ngram.WIDTH, help="followers of a context")
    parser.add_argument("--min_count", type=int, default=1, help="rarer n-grams are dropped")
    parser.add_argument("--which", choices=("targets", "inputs"), default="targets")
    arguments = parser.parse_args()
    try:
        vocabulary = open_vocabulary(arguments.vocabulary, arguments.extra_ids)
        side = ("inputs", "targets").index(arguments.which)
        sequences = [text[side] for path in arguments.files for text in examples.load(path)]
        table = count_ngrams(
            sequences, arguments.order, vocabulary.size, arguments.width, arguments.min_count
        )
        ngram.TABLE.save(arguments.output, vocabulary, table)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    print(
        f"{arguments.output}: {len(table['count'])} n-grams of {len(table['total'])} contexts "
        f"from {table['unigram'].sum()} tokens of {len(sequences)} {arguments.which}, "
        f"{arguments.output.stat().st_size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
