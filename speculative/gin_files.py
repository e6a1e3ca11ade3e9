"""Reads gin files, whose includes come from the checkout wherever a command is run."""

import contextlib
import os
import pathlib
from collections.abc import Sequence

import gin

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"  # Of a checkout.


def read(file: str | pathlib.Path, bindings: Sequence[str] = ()) -> None:
    """Applies a gin file, then bindings like `RowConfig.gamma = 3`.

    Included files are searched in the checkout, then in the working directory.
    """
    # Gin takes an include's folder `configs` for a package without a file before it looks in its
    # search path, unless the file is found from the working directory.
    gin.add_config_file_search_path(os.getcwd())
    path = pathlib.Path(file).resolve()
    with contextlib.chdir(CONFIGS.parent):
        gin.parse_config_files_and_bindings([str(path)], list(bindings))
