"""The shared part of the training scripts: options, gin, and errors in one line."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gin

from speculative import disk, gin_files
from speculative.loading import enable_compilation_cache
from speculative.models import DecoderOnlyConfig, T5Config, named
from speculative.training import distil, loop, train

MODELS = (T5Config, DecoderOnlyConfig, named)
KNOWN = (*MODELS, loop.TrainConfig, train.Files, train.train, distil.distil)
"""What gin files of training configure; they may import the modules of these, and no others."""
for configurable in KNOWN:
    gin.register(configurable)


def main(recipe: Callable[..., bool], documentation: str | None, target_dir: bool = False) -> int:
    """Configures `train.train` or `distil.distil` by gin, runs it, and returns the exit code.

    The first line of the script's `documentation` heads `--help`; `target_dir` says whether the
    recipe needs a target.
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
    # The gin file decides about options that are not given.
    arguments = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    config, bindings = arguments.pop("config"), arguments.pop("gin")
    enable_compilation_cache()  # A resumed run needs the same compiled programs.
    try:
        finished = recipe(**configured(recipe, config, bindings, arguments))
    except (ValueError, OSError) as error:
        print("error:", disk.sentence(error), file=sys.stderr)
        return 2
    return 0 if finished else loop.UNFINISHED


def configured(
    recipe: Callable[..., bool], file: str, bindings: Sequence[str], arguments: dict[str, Any]
) -> dict[str, Any]:
    """A recipe's parameters by a gin file, bindings and, before these, arguments.

    Raises ValueError if the file names something that does not exist, or leaves out a parameter.
    """
    try:
        gin_files.read(file, bindings, {known.__module__ for known in KNOWN})
        parameters = gin.get_bindings(recipe) | arguments
        inspect.signature(recipe).bind(**parameters)
        return parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be used: {error}") from error
