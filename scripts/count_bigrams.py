"""Counts which token follows which in training targets: the table of the bigram draft.

python scripts/count_bigrams.py data/tokenized/debian_ende_train.npz \
    data/tokenized/debian_synopsis_train.npz

The files are those of scripts/export_tokenized.py.
"""

import argparse
import pathlib
from typing import Any

import numpy as np

from speculative import checkpoints
from speculative.drafts import count_bigrams


def read_targets(path: pathlib.Path) -> list[np.ndarray]:
    """Every target of a file of token ids.

    Raises:
        ValueError: the file holds no targets.
    """
    with np.load(path) as arrays:
        if not {"targets", "targets_offsets"} <= set(arrays):
            raise ValueError(f"{path} holds no targets; write it with scripts/export_tokenized.py.")
        return np.split(arrays["targets"], arrays["targets_offsets"][1:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the bigrams of training targets.")
    parser.add_argument("files", type=pathlib.Path, nargs="+", help=".npz files of token ids")
    parser.add_argument("--output", type=pathlib.Path, default=checkpoints.ASSETS / "bigrams.npz")
    parser.add_argument("--min_count", type=int, default=2, help="rarer pairs are dropped")
    arguments = parser.parse_args()
    try:
        sequences = [target for path in arguments.files for target in read_targets(path)]
        counts = count_bigrams(sequences)
        kept = counts["count"] >= arguments.min_count
        if not kept.any():
            raise ValueError(f"No pair was seen {arguments.min_count} times; lower --min_count.")
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    smallest: dict[str, Any] = {
        name: values[kept].astype(np.min_scalar_type(values.max()))
        for name, values in counts.items()
    }
    np.savez_compressed(arguments.output, **smallest)
    print(
        f"{arguments.output}: {kept.sum()} of {len(kept)} pairs, from {len(sequences)} targets, "
        f"{arguments.output.stat().st_size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
