"""The interface of programs that are compared, their list, and a process for each of them."""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import pkgutil
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from speculative.rows import environment


@dataclasses.dataclass(frozen=True)
class Setting:
    """A pair and how it decodes, the same for all programs.

    Attributes:
        target: a checkpoint's name, or a size of random weights.
        draft: the same for the draft; None for only autoregressive decoding.
        random: whether the weights are random; no token then ends an output before `max_length`.
        exported: the folder of the same target in Hugging Face's format; programs may write their
            own files next to it.
        max_length: tokens at which an output is cut.
        gamma: guesses per step.
        decoder_only: whether the target is decoder-only; otherwise it is a T5.
        exported_draft: the folder of a decoder-only draft that is a model, for other programs.
    """

    target: str
    draft: str | None
    random: bool
    exported: str
    max_length: int
    gamma: int
    decoder_only: bool = False
    exported_draft: str | None = None


def thread_counts() -> dict[str, int]:
    """Numbers of threads for other programs, by name: all cores, and one, which may be faster."""
    counts = sorted({1, environment.cores()})
    return {f"{count} thread{'s' * (count > 1)}": count for count in counts}


class Program(NamedTuple):
    """The module and class of a program's system, the modules it needs, how to install them.

    `kinds` are the values of `Setting.decoder_only` that it supports.

    A system is made from a `Setting`. It decodes greedily, in `ways` that it names, by the methods
    of `Process`; only `compare_peers.MEASURE` needs `margin`.
    """

    system: str
    needs: tuple[str, ...]
    remedy: str
    kinds: tuple[bool, ...] = (False, True)

    def missing(self) -> str | None:
        """The first needed module that cannot be imported, or None."""
        for name in self.needs:
            # An ImportError: a module's package is missing, or lacks something itself.
            with contextlib.suppress(ImportError):
                if importlib.util.find_spec(name):
                    continue
            return name
        return None


PEERS, EXTRA = "benchmarks.peers", "install this package with its extra, pip install -e '.[peers]'"
PROGRAMS = {
    "speculative": Program(f"{PEERS}.ours:Ours", (), ""),
    "transformers": Program(f"{PEERS}.huggingface:HuggingFace", ("torch", "transformers"), EXTRA),
    "ctranslate2": Program(
        f"{PEERS}.opennmt:OpenNMT", ("ctranslate2", "torch", "transformers"), EXTRA
    ),
    "llama.cpp": Program(
        f"{PEERS}.ggml:LlamaCpp",
        ("llama_cpp", "gguf"),
        EXTRA,
        (True,),
    ),
    "t5x": Program(
        f"{PEERS}.google:T5X",
        ("t5x.decoding", "t5x.examples.t5.network"),
        "put a checkout of github.com/google-research/t5x on PYTHONPATH",
        (False,),
    ),
}
"""All programs that can be compared, this package first."""


class Process:
    """Runs one system in its own process, which computes only while it answers a call.

    An error of the system ends the process and raises a RuntimeError whose message ends with it.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        """Starts the process and loads the models."""
        self._name = name
        # JAX's threads do not survive a fork.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.ways: tuple[str, ...]
        self.ways = self._answer(_load, PROGRAMS[name].system, setting)

    def decode(self, way: str, source: list[int]) -> tuple[list[int], float]:
        """The target's output for a source or prompt, its end token included, and seconds."""
        return self._answer(_call, "decode", way, source)

    def prefill(self, source: list[int]) -> float:
        """The seconds until the first step, for reading a prompt or encoding a source."""
        return self._answer(_call, "prefill", source)[1]

    def margin(self, source: list[int], prefix: list[int], one: int, other: int) -> float:
        """The difference of two tokens' logits after a prefix."""
        return self._answer(_call, "margin", source, prefix, one, other)[0]

    def _answer(self, function: Any, *arguments: Any) -> Any:
        try:
            return self._pool.submit(function, *arguments).result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"{self._name} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()


_loaded: list[Any] = []  # The system of this process.


def _load(system: str, setting: Setting) -> tuple[str, ...]:
    loaded = pkgutil.resolve_name(system)(setting)
    _loaded.append(loaded)
    return loaded.ways


def _call(method: str, *arguments: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    result = getattr(_loaded[0], method)(*arguments)
    return result, time.perf_counter() - began
