"""Keeps a sample of the target's outputs, from which the suffix draft copies.

python scripts/keep_outputs.py work/draft/texts/debian_ende_unlabelled_greedy.npz \
    work/draft/texts/debian_synopsis_unlabelled_greedy.npz \
    --vocabulary speculative/assets/debian.model

The files are those in which scripts/distil.py keeps the target's texts.
"""

import argparse
import pathlib

from speculative import checkpoints
from speculative.drafts import suffix
from speculative.training import examples
from speculative.vocabulary import open_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description="Keeps a sample of the target's outputs.")
    parser.add_argument("files", type=pathlib.Path, nargs="+", help=".npz files of token ids")
    parser.add_argument(
        "--vocabulary", type=pathlib.Path, default=checkpoints.ASSETS / "debian.model"
    )
    parser.add_argument("--tokens", type=int, default=300_000, help="the largest number to keep")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=checkpoints.SHIPPED["debian_target"] / suffix.TABLE.file,
    )
    arguments = parser.parse_args()
    try:
        targets = [target for path in arguments.files for _, target in examples.load(path)]
        share = min(1.0, arguments.tokens / sum(map(len, targets)))
        kept, room = [], 0.0
        for target in targets:
            room += share * len(target)
            if len(target) <= room:
                room -= len(target)
                kept.append(target)
        if not kept:
            raise ValueError(f"No output has at most {arguments.tokens} tokens; raise --tokens.")
        suffix.save(arguments.output, kept, open_vocabulary(arguments.vocabulary))
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    print(
        f"{arguments.output}: {len(kept)} of {len(targets)} outputs, {sum(map(len, kept))} tokens, "
        f"{arguments.output.stat().st_size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
