"""Programs of a pair, compiled with what the compiler of the device needs to be told."""

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from speculative.backends import compiler_options

_compiling: list[tuple[float, float]] = []  # When JAX traced or compiled, from and to.


def _note(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if not event.startswith("/jax/core/compile/"):
        return
    ends = time.perf_counter()
    begins = ends - duration_secs
    while _compiling and _compiling[-1][0] >= begins:  # What was traced within is part of it.
        _compiling.pop()
    _compiling.append((begins, ends))


jax.monitoring.register_event_duration_secs_listener(_note)


def seconds_compiling() -> float:
    """The seconds in which this process has traced and compiled so far."""
    return sum(ends - begins for begins, ends in _compiling)


def _trim() -> None:
    """Gives back what compilers have freed, of which the C library of Linux keeps much."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Program:
    """A jitted function of a pair's models, a static argument and the first one.

    It is `jax.jit` of the function but for the compiler's options, which are those of
    `backends.compiler_options` where the pair has a draft, and in that it forgets: of what it has
    compiled for other models, settings and shapes it keeps the `KEPT` last used.
    """

    KEPT = 24  # The costs of a pair are timed in turns with up to 19 programs (`tune`).

    def __init__(self, function: Callable[..., Any], **given: Any) -> None:
        """A program of the function; `given` is what `jax.jit` is given."""
        functools.update_wrapper(self, function)
        self._function, self._given = function, given
        self._jitted: dict[Hashable, Any] = {}  # The last used one is last.
        self._lock = threading.Lock()

    def _of(self, models: Any, given: Sequence[Any], device: Any = None) -> Any:
        """The jitted function for a pair on a device, by default the present one."""
        options = () if models.draft is None else compiler_options(device)
        leaves, tree = jax.tree.flatten(given[1:])  # Parameters are as large as their model says.
        key = options, models, tree, tuple(map(np.shape, leaves))
        with self._lock:
            if (jitted := self._jitted.pop(key, None)) is None:
                # A function of its own, or JAX would keep what it traced for as long as this one.
                own = functools.wraps(self._function)(lambda *given: self._function(*given))
                told = {"compiler_options": dict(options)} if options else {}
                jitted = jax.jit(own, **told, **self._given)
            self._jitted[key] = jitted
            if len(self._jitted) > self.KEPT:
                self._jitted.pop(next(iter(self._jitted))).clear_cache()
                _trim()
        return jitted

    def __call__(self, models: Any, *given: Any) -> Any:
        """Runs the function on the present device."""
        return self._of(models, given)(models, *given)

    def lower(self, models: Any, *given: Any, device: Any = None) -> Any:
        """What `jax.jit`'s `lower` gives, for a device that may be described only."""
        return self._of(models, given, device).lower(models, *given)

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled."""
        with self._lock:
            while self._jitted:
                self._jitted.popitem()[1].clear_cache()
