"""Writes the token ids of tasks, by default both of Debian, for training without TensorFlow.

SPECULATIVE_DATA=data python scripts/export_tokenized.py --output_dir=data/tokenized
python scripts/export_tokenized.py --tasks=wmt_t2t_ende_v003 --output_dir=data/tokenized
"""

import argparse
import pathlib

from speculative.tasks import get_task


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes token ids for training without TensorFlow."
    )
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--tasks", default="debian_ende,debian_synopsis")
    arguments = parser.parse_args()
    try:
        for name in arguments.tasks.split(","):
            task = get_task(name)
            from speculative.tasks import debian  # imports TensorFlow, so only now

            for split in task.splits:
                path = arguments.output_dir / f"{name}_{split}.npz"
                counts = debian.export_tokenized(name, split, path)
                print(f"{path}: {counts['examples']} examples, {counts['dropped']} too long")
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
