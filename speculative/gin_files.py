"""Reading gin files, whose includes are those of the checkout wherever a command is run."""

import contextlib
import os
import pathlib
from collections.abc import Sequence

import gin

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
"""The configurations of a checkout."""


def read(file: str | pathlib.Path, bindings: Sequence[str] = ()) -> None:
    """Binds what a gin file says, then what bindings like `RowConfig.gamma = 3` do.

    What it includes is looked for in the checkout, then in the working directory.
    """
    # Gin takes the folder of an include for a package before it looks in its search path, and a
    # checkout's `configs`, seen as one, has no file: the checkout must be where it looks first.
    gin.add_config_file_search_path(os.getcwd())
    path = pathlib.Path(file).resolve()
    with contextlib.chdir(CONFIGS.parent):
        gin.parse_config_files_and_bindings([str(path)], list(bindings))
