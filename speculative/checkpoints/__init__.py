"""Checkpoints, from a folder or by the name of one that ships with the package."""

import pathlib

from speculative.checkpoints import native, t5x
from speculative.models import T5Config
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary

ASSETS = pathlib.Path(__file__).parent.parent / "assets"
SHIPPED = {"debian_target": ASSETS / "target", "debian_draft": ASSETS / "draft"}
"""The pair that ships with the package, by name."""

__all__ = ["ASSETS", "SHIPPED", "load", "native", "t5x"]


def locate(name: str) -> pathlib.Path:
    """The folder of a checkpoint given by folder or by name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    folder = SHIPPED.get(name) or pathlib.Path(name)
    if not folder.is_dir():
        raise ValueError(
            f"There is no checkpoint {name!r}: it is neither a folder nor one of "
            f"{', '.join(SHIPPED)}."
        )
    return folder


def load(name: str) -> tuple[T5Config, PyTree, Vocabulary]:
    """Configuration, float32 parameters and vocabulary of a native checkpoint.

    Raises:
        ValueError: it does not exist, is damaged, or came without a vocabulary.
    """
    folder = locate(name)
    config, params = native.load(folder)
    file = native.describe(folder)["vocabulary"]
    if file is None:
        raise ValueError(f"The checkpoint {folder} has no vocabulary beside its weights.")
    return config, params, Vocabulary(folder / file)
