"""What a program that is compared must be able to do, and what all of them are given."""

import dataclasses
import importlib.util
from typing import Protocol

from speculative.experiments import environment


@dataclasses.dataclass(frozen=True)
class Setting:
    """A pair and how it decodes, the same for all.

    Attributes:
        target: a checkpoint's name, or a size of random weights.
        draft: likewise; None leaves speculation out.
        random: whether the weights are random, and so no text ends but by its length.
        exported: the folder of the same target in Hugging Face's format.
        max_length: tokens at which an output is cut.
        gamma: guesses a step.
    """

    target: str
    draft: str | None
    random: bool
    exported: str
    max_length: int
    gamma: int

    @property
    def ends(self) -> bool:
        """Whether the end-of-sequence token ends an output; else all have `max_length`."""
        return not self.random


def thread_counts() -> dict[str, int]:
    """With how many threads peers are run: one, and all; waking threads may cost more than it wins.

    By name, the most threads last.
    """
    counts = sorted({1, environment.cores()})
    return {f"{count} thread{'s' * (count > 1)}": count for count in counts}


class System(Protocol):
    """A program, ready to decode greedily."""

    ways: tuple[str, ...]
    """In which it decodes."""

    def __init__(self, setting: Setting) -> None:
        """Loads the models."""
        ...

    def decode(self, way: str, source: list[int]) -> list[int]:
        """The target's output for a source, both with their end-of-sequence token."""
        ...

    def prefill(self, source: list[int]) -> None:
        """Encodes a source for the target and projects every layer's cross-attention on it."""
        ...


@dataclasses.dataclass(frozen=True)
class Program:
    """Where a system is found.

    Attributes:
        system: module and class of its `System`.
        needs: modules that must be importable.
        remedy: what to do where they are not.
    """

    system: tuple[str, str]
    needs: tuple[str, ...]
    remedy: str

    def missing(self) -> str | None:
        """The first module that it lacks."""
        return next((name for name in self.needs if not _importable(name)), None)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # A module's package is missing, or lacks something itself.
        return False


EXTRA = "install this package with its extra, pip install -e '.[peers]'"

PROGRAMS = {
    "speculative": Program(("speculative.peers.ours", "Ours"), (), ""),
    "transformers": Program(
        ("speculative.peers.huggingface", "HuggingFace"), ("torch", "transformers"), EXTRA
    ),
    "ctranslate2": Program(
        ("speculative.peers.opennmt", "OpenNMT"), ("ctranslate2", "torch", "transformers"), EXTRA
    ),
    "t5x": Program(
        ("speculative.peers.google", "T5X"),
        ("t5x.decoding", "t5x.examples.t5.network"),
        "put a checkout of github.com/google-research/t5x on PYTHONPATH",
    ),
}
"""All that can be compared, this package first."""
