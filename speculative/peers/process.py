"""A system in a process of its own, so that programs are not in each other's way."""

import importlib
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from speculative.peers.system import PROGRAMS, Setting


class Process:
    """Runs one system; it computes only while it is asked for something."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Starts the process and waits until the models are loaded.

        Raises:
            RuntimeError: the system failed; the message ends with what it said.
        """
        context = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork.
        self._name = name
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, setting, other), daemon=True)
        self._process.start()
        other.close()
        self.ways: tuple[str, ...] = self._answer()

    def decode(self, way: str, source: list[int]) -> tuple[list[int], float]:
        """The output for a source, and the seconds that it took there."""
        return self._ask("decode", way, source)

    def prefill(self, source: list[int]) -> float:
        """The seconds of a prefill there."""
        return self._ask("prefill", source)[1]

    def margin(self, source: list[int], prefix: list[int], one: int, other: int) -> float:
        """By how much the logits of two tokens after a prefix differ, of a system that tells."""
        return self._ask("margin", source, prefix, one, other)[0]

    def _ask(self, *request: Any) -> Any:
        self._connection.send(request)
        return self._answer()

    def _answer(self) -> Any:
        try:
            failure, answer = self._connection.recv()
        except EOFError:
            self._process.join()
            failure, answer = f"its process ended with {self._process.exitcode}", None
        if failure:
            raise RuntimeError(f"{self._name} failed: {failure}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join()


def _serve(name: str, setting: Setting, connection: Connection) -> None:
    """Answers with (what failed or "", answer), first with the ways of the loaded system."""
    try:
        module, of = PROGRAMS[name].system
        system = getattr(importlib.import_module(module), of)(setting)
        connection.send(("", system.ways))
        while True:
            method, *arguments = connection.recv()
            began = time.perf_counter()
            found = getattr(system, method)(*arguments)
            connection.send(("", (found, time.perf_counter() - began)))
    except EOFError:
        pass
    except Exception:
        connection.send((traceback.format_exc(limit=-3), None))
