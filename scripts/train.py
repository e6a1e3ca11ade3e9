"""Trains a target as a gin file says; run again, it goes on where it stopped.

    python scripts/train.py --config=configs/training/target.gin --data_dir=data/tokenized \
        --work_dir=work/target --out_dir=work/pair/target

The log is WORK_DIR/log.jsonl, its curves are in WORK_DIR/training.png. On several hosts each one
runs the command, with --distributed=auto and a --checkpoint_dir that all of them see.
"""

import argparse
import pathlib
import sys

from absl import logging

from speculative import disk
from speculative.backends import processes
from speculative.loading import enable_compilation_cache
from speculative.reporting import curves
from speculative.training import loop, recipes, train


def draw(work_dir: pathlib.Path) -> None:
    """Draws the curves of a run into its folder; what keeps it from that does not end the run."""
    try:
        curves.training(loop.Log(work_dir).lines()).savefig(work_dir / "training.png", dpi=110)
    except OSError as error:
        logging.warning("The curves cannot be drawn: %s", disk.sentence(error))


def main() -> int:
    """Configures `train.train` by gin, runs it, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Trains a target as a gin file says.", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], help="a binding that overrides it")
    parser.add_argument("--data_dir", required=True, help="where the tokenised files are")
    parser.add_argument("--work_dir", required=True, help="checkpoints and log")
    parser.add_argument("--out_dir", required=True, help="the checkpoint to make")
    parser.add_argument("--vocabulary", help="SentencePiece model of the files (as configured)")
    parser.add_argument("--init_from", help="start from this checkpoint, not from random weights")
    parser.add_argument("--max_minutes", type=float, help="then save and stop; exit code 75")
    parser.add_argument("--mesh", help="devices that share the work, as data:8 or data:4,model:2")
    parser.add_argument("--checkpoint_dir", help="of training, also gs://… (in --work_dir)")
    parser.add_argument(
        "--distributed",
        metavar="HOST:PORT,K/N|auto",
        help="one process of several, see docs/mesh.md; they share --checkpoint_dir",
    )
    # The gin file decides about options that are not given.
    arguments = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    config, bindings = arguments.pop("config"), arguments.pop("gin")
    distributed = arguments.pop("distributed", None)
    try:
        if distributed:
            processes.join(distributed)
        enable_compilation_cache()  # A resumed run needs the same compiled programs.
        given = recipes.configured(train.train, config, bindings, arguments)
        finished = train.train(**given, on_evaluation=draw)
    except (ValueError, OSError) as error:
        print("error:", disk.sentence(error), file=sys.stderr)
        return 2
    return 0 if finished else loop.UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
