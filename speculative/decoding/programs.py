"""Programs of a pair, compiled with what the compiler of the device needs to be told."""

import functools
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from speculative.backends import compiler_options

P = ParamSpec("P")
T = TypeVar("T")

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


class Program(Generic[P, T]):
    """A jitted function whose first argument, a static one, is a pair's models.

    It is `jax.jit` of the function but for the compiler's options, which are those of
    `backends.compiler_options` where the pair has a draft.
    """

    def __init__(self, function: Callable[P, T], donated: tuple[str, ...] = ()) -> None:
        """A program of the function, to which the arguments of these names are given away."""
        functools.update_wrapper(self, function)
        self._function, self._donated = function, donated
        self._jitted: dict[tuple[tuple[str, str | bool], ...], Any] = {}

    def on(self, models: Any, device: Any = None) -> Any:
        """The jitted function for a pair on a device, by default the present one.

        Lowered, the device may be one that is described only.
        """
        options = () if models.draft is None else compiler_options(device)
        if options not in self._jitted:
            self._jitted[options] = jax.jit(
                self._function,
                static_argnums=0,
                donate_argnames=self._donated,
                compiler_options=dict(options) or None,
            )
        return self._jitted[options]

    def __call__(self, *given: P.args, **named: P.kwargs) -> T:
        """Runs the function on the present device."""
        models: Any = given[0]
        return self.on(models)(*given, **named)

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled."""
        for jitted in self._jitted.values():
            jitted.clear_cache()
