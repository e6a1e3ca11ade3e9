"""Trains a target as a gin file says; run again, it goes on where it stopped.

    python scripts/train.py --config=configs/training/target.gin --data_dir=data/tokenized \
        --work_dir=work/target --out_dir=work/pair/target
"""

import argparse
import sys

from speculative import disk
from speculative.loading import enable_compilation_cache
from speculative.training import loop, recipes, train


def main() -> int:
    """Configures `train.train` by gin, runs it, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Trains a target as a gin file says.")
    parser.add_argument("--config", required=True, help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], help="a binding that overrides it")
    parser.add_argument("--data_dir", required=True, help="where the tokenised files are")
    parser.add_argument("--work_dir", required=True, help="checkpoints and log")
    parser.add_argument("--out_dir", required=True, help="the checkpoint to make")
    parser.add_argument("--vocabulary", help="SentencePiece model of the files (as configured)")
    parser.add_argument("--init_from", help="start from this checkpoint, not from random weights")
    parser.add_argument("--max_minutes", type=float, help="then save and stop; exit code 75")
    # The gin file decides about options that are not given.
    arguments = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    config, bindings = arguments.pop("config"), arguments.pop("gin")
    enable_compilation_cache()  # A resumed run needs the same compiled programs.
    try:
        finished = train.train(**recipes.configured(train.train, config, bindings, arguments))
    except (ValueError, OSError) as error:
        print("error:", disk.sentence(error), file=sys.stderr)
        return 2
    return 0 if finished else loop.UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
