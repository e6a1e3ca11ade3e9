"""The shared part of the training scripts: options, gin, and errors in one line."""

import argparse
import sys
from collections.abc import Callable

import gin

from speculative import gin_files
from speculative.loading import enable_compilation_cache

UNFINISHED = 75
"""Exit code of a run that stopped at `--max_minutes`; the same command continues it."""


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
        _configure(config, bindings)
        finished = gin.get_configurable(recipe)(**arguments)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0 if finished else UNFINISHED


def _configure(file: str, bindings: list[str]) -> None:
    """Applies a gin file; raises ValueError if it names something that does not exist."""
    try:
        gin_files.read(file, bindings)
    except (AttributeError, ValueError) as error:
        if "speculative.models.config" in str(error) or "'config.named'" in str(error):
            raise ValueError(
                f"{file} is of an older layout: import speculative.models.t5.config or "
                "speculative.models.gpt.config in place of speculative.models.config, and "
                "speculative.models.registry for registry.named in place of config.named, as "
                "configs/training does."
            ) from error
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{file} names what does not exist: {error}") from error
