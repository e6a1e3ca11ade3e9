"""Trains a target as configured by a gin file; rerun to resume where it stopped.

    python scripts/train.py --config=configs/training/target.gin --data_dir=data/tokenized \
        --work_dir=work/target --out_dir=work/pair/target

The log is WORK_DIR/log.jsonl, its curves are in WORK_DIR/training.png. With several hosts, run the
command on each, with --distributed=auto and a --checkpoint_dir that all of them see.
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
    """Plots the curves of a run into its folder; a failure does not end the run."""
    try:
        curves.training(loop.Log(work_dir).lines()).savefig(work_dir / "training.png", dpi=110)
    except OSError as error:
        logging.warning("The curves cannot be plotted: %s", disk.sentence(error))


def main() -> int:
    """Configures `train.train` by gin, runs it, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Trains a target as configured by a gin file.", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], help="a binding that overrides it")
    parser.add_argument("--data_dir", required=True, help="folder of the tokenized files")
    parser.add_argument("--work_dir", required=True, help="folder of checkpoints and log")
    parser.add_argument("--out_dir", required=True, help="the checkpoint to write")
    parser.add_argument("--vocabulary", help="SentencePiece model of the files (as configured)")
    parser.add_argument("--init_from", help="start from this checkpoint, not from random weights")
    parser.add_argument("--max_minutes", type=float, help="save and stop after these; exit code 75")
    parser.add_argument("--mesh", help="devices that share the work, as data:8 or data:4,model:2")
    parser.add_argument("--checkpoint_dir", help="training state, also gs://… (in --work_dir)")
    parser.add_argument(
        "--distributed",
        metavar="HOST:PORT,K/N|auto",
        help="run as one of several processes (docs/mesh.md); they share --checkpoint_dir",
    )
    # The gin file sets the options that are omitted.
    arguments = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    config, bindings = arguments.pop("config"), arguments.pop("gin")
    distributed = arguments.pop("distributed", None)
    try:
        if distributed:
            processes.join(distributed)
        enable_compilation_cache()  # A resumed run needs the same compiled programs.
        parameters = recipes.configured(train.train, config, bindings, arguments)
        finished = train.train(**parameters, on_evaluation=draw)
    except (ValueError, OSError) as error:
        print(f"error: {disk.sentence(error)}", file=sys.stderr)
        return 2
    return 0 if finished else loop.UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
