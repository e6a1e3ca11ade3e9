"""Programs of a pair, compiled with what the compiler of the device needs to be told."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax

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


class Program:
    """A jitted function of a pair's models, a static argument and the first one.

    It is `jax.jit` of the function but for the compiler's options, which are those of
    `backends.compiler_options` where the pair has a draft.
    """

    def __init__(self, function: Callable[..., Any], **given: Any) -> None:
        """A program of the function; `given` is what `jax.jit` is given."""
        functools.update_wrapper(self, function)
        self._function, self._given = function, given
        self._jitted: dict[tuple[bool, Any], Any] = {}

    def on(self, models: Any, device: Any = None) -> Any:
        """The jitted function for a pair on a device, by default the present one."""
        options = () if models.draft is None else compiler_options(device)
        told = {"compiler_options": dict(options)} if options else {}
        if (kind := (models.draft is None, device)) not in self._jitted:
            self._jitted[kind] = jax.jit(self._function, **told, **self._given)
        return self._jitted[kind]

    def __call__(self, models: Any, *given: Any) -> Any:
        """Runs the function on the present device."""
        jitted = self._jitted.get((models.draft is None, None)) or self.on(models)
        return jitted(models, *given)

    def lower(self, models: Any, *given: Any, device: Any = None) -> Any:
        """What `jax.jit`'s `lower` gives, for a device that may be described only."""
        return self.on(models, device).lower(models, *given)

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled."""
        for jitted in self._jitted.values():
            jitted.clear_cache()
