"""The interface of programs that are compared, their list, and a process for each of them."""

import dataclasses
import importlib.util
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple, Protocol

from speculative.rows import environment


@dataclasses.dataclass(frozen=True)
class Setting:
    """A pair and how it decodes, the same for all programs.

    Attributes:
        target: a checkpoint's name, or a size of random weights.
        draft: likewise; None for autoregressive decoding alone.
        random: whether the weights are random; every output then has `max_length` tokens.
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
        """Whether the end-of-sequence token ends an output."""
        return not self.random


def thread_counts() -> dict[str, int]:
    """Numbers of threads for other programs, by name: all cores, and one, which may be faster."""
    counts = sorted({1, environment.cores()})
    return {f"{count} thread{'s' * (count > 1)}": count for count in counts}


class System(Protocol):
    """A program, ready to decode greedily."""

    ways: tuple[str, ...]
    """The names of its ways of decoding."""

    def __init__(self, setting: Setting) -> None:
        """Loads the models."""
        ...

    def decode(self, way: str, source: list[int]) -> list[int]:
        """The target's output for a source, both with their end-of-sequence token."""
        ...

    def prefill(self, source: list[int]) -> None:
        """Encodes a source for the target and projects every layer's cross-attention on it."""
        ...


class Program(NamedTuple):
    """A program: module and class of its `System`, the modules it needs, how to install them."""

    system: tuple[str, str]
    needs: tuple[str, ...]
    remedy: str

    def missing(self) -> str | None:
        """The first needed module that cannot be imported, or None."""
        return next((name for name in self.needs if not _importable(name)), None)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # A module's package is missing, or lacks something itself.
        return False


EXTRA = "install this package with its extra, pip install -e '.[peers]'"

PROGRAMS = {
    "speculative": Program(("benchmarks.peers.ours", "Ours"), (), ""),
    "transformers": Program(
        ("benchmarks.peers.huggingface", "HuggingFace"), ("torch", "transformers"), EXTRA
    ),
    "ctranslate2": Program(
        ("benchmarks.peers.opennmt", "OpenNMT"), ("ctranslate2", "torch", "transformers"), EXTRA
    ),
    "t5x": Program(
        ("benchmarks.peers.google", "T5X"),
        ("t5x.decoding", "t5x.examples.t5.network"),
        "put a checkout of github.com/google-research/t5x on PYTHONPATH",
    ),
}
"""All that can be compared, this package first."""


class Process:
    """Runs one system in a process of its own, which computes only while it answers a call."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Starts the process and loads the models.

        Raises:
            RuntimeError: the system failed; the message ends with its error.
        """
        self._name = name
        # JAX's threads do not survive a fork.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            self.ways: tuple[str, ...] = self._answer(_load, PROGRAMS[name].system, setting)
        except RuntimeError:
            self.close()
            raise

    def decode(self, way: str, source: list[int]) -> tuple[list[int], float]:
        """The output for a source, and the seconds that the process took for it."""
        return self._answer(_call, "decode", way, source)

    def prefill(self, source: list[int]) -> float:
        """The seconds that the process took for a prefill."""
        return self._answer(_call, "prefill", source)[1]

    def margin(self, source: list[int], prefix: list[int], one: int, other: int) -> float:
        """The difference of two tokens' logits after a prefix; only some systems compute it."""
        return self._answer(_call, "margin", source, prefix, one, other)[0]

    def _answer(self, function: Any, *arguments: Any) -> Any:
        try:
            return self._pool.submit(function, *arguments).result()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{self._name} failed: {said}") from error

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()


_loaded: list[Any] = []
"""The system of this process."""


def _load(system: tuple[str, str], setting: Setting) -> tuple[str, ...]:
    module, name = system
    _loaded.append(getattr(importlib.import_module(module), name)(setting))
    return _loaded[0].ways


def _call(method: str, *arguments: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    found = getattr(_loaded[0], method)(*arguments)
    return found, time.perf_counter() - began
