"""What the training scripts share: flags, gin, one line for an error."""

import argparse
import os
import sys
from collections.abc import Callable

import gin
import jax

from speculative import gin_files

UNFINISHED = 75
"""Exit code of a run that stopped at `--max_minutes`; the same command goes on."""


def main(recipe: Callable[..., bool], documentation: str | None, target_dir: bool = False) -> int:
    """Configures a recipe by gin, runs it, and returns the process's exit code.

    Args:
        recipe: `train.train` or `distil.distil`.
        documentation: of the script; its first line heads `--help`.
        target_dir: whether the recipe needs a target.
    """
    parser = argparse.ArgumentParser(description=(documentation or "").split("\n")[0])
    parser.add_argument("--config", required=True, help="a .gin file")
    parser.add_argument("--gin", action="append", default=[], help="a binding that overrides it")
    if target_dir:
        parser.add_argument("--target_dir", required=True, help="the target's checkpoint")
    parser.add_argument("--data_dir", required=True, help="where the tokenised files are")
    parser.add_argument("--work_dir", required=True, help="checkpoints, log, written text")
    parser.add_argument("--out_dir", required=True, help="the checkpoint to make")
    parser.add_argument("--vocabulary", help="SentencePiece model of the files (as configured)")
    parser.add_argument("--init_from", help="start from this checkpoint, not from random weights")
    parser.add_argument("--max_minutes", type=float, help="then save and stop; exit code 75")
    # What is not given is left to the gin file.
    arguments = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    config, bindings = arguments.pop("config"), arguments.pop("gin")
    # A resumed run compiles the same programs again; this keeps them.
    cache = os.path.join(arguments["work_dir"], os.pardir, "compiled")
    jax.config.update("jax_compilation_cache_dir", os.path.abspath(cache))
    try:
        gin_files.read(config, bindings)
        finished = gin.get_configurable(recipe)(**arguments)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0 if finished else UNFINISHED
