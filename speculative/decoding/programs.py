"""Programs of a pair, compiled with the options that suit the device."""

import contextlib
import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from speculative.backends import compiler_options
from speculative.backends.options import LARGE, WIDE
from speculative.models import sharding
from speculative.types import PyTree

P = ParamSpec("P")
T = TypeVar("T")

_compiling: list[tuple[float, float]] = []  # Start and end times of JAX's tracing and compiling.


def _note(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if not event.startswith("/jax/core/compile/"):
        return
    ends = time.perf_counter()
    begins = ends - duration_secs
    while _compiling and _compiling[-1][0] >= begins:  # Nested events are included.
        _compiling.pop()
    _compiling.append((begins, ends))


jax.monitoring.register_event_duration_secs_listener(_note)


def seconds_compiling() -> float:
    """The seconds that this process has spent on tracing and compiling so far."""
    return sum(ends - begins for begins, ends in _compiling)


def _trim() -> None:
    """Returns memory that compilers freed, which Linux's C library would otherwise hold."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def bytes_of(tree: PyTree) -> int:
    """The size in bytes of arrays, or of arrays given only by their shapes."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _options(models: Any, params: PyTree, *_: Any, device: Any = None) -> dict[str, str | bool]:
    reads_ahead = models.draft is not None or bytes_of(params) > LARGE
    in_int8 = [x for x in jax.tree.leaves(params) if getattr(x, "dtype", None) == np.int8]
    wide = any(bytes_of(kernel) > WIDE for kernel in in_int8)
    return dict(compiler_options(reads_ahead, wide, device))


def _laid_out(function: Callable[..., T], on: Mesh, spread: bool) -> Callable[..., T]:
    """The function, with its results laid out on a mesh by `sharding.shardings`."""

    def own(*arguments: Any) -> T:
        results = function(*arguments)
        where = sharding.shardings(results, on, draft=spread)
        return jax.lax.with_sharding_constraint(results, where)

    return own


class Program(Generic[P, T]):
    """A jitted function whose first arguments are a pair's models (static) and their parameters.

    It differs from `jax.jit` of the function in three ways. It compiles with the options of
    `backends.compiler_options`; on several devices it lays results out by their names, as
    `sharding.shardings` does; and of all programs, for whichever models, settings and shapes, it
    keeps only the `KEPT` last used.
    """

    # `tune` times costs in turns with up to 19 programs; batches use two for each size, and two
    # that begin texts.
    KEPT = 24
    _kept: ClassVar[dict[tuple[Any, ...], Any]] = {}  # Jitted functions, the last used one last.
    _lock = threading.Lock()

    def __init__(
        self, function: Callable[P, T], donated: tuple[str, ...] = (), static: int = 0
    ) -> None:
        """Makes a program of the function.

        The arguments named in `donated` are donated; the last `static` arguments are static and
        must be hashable.
        """
        functools.update_wrapper(self, function)
        self._function, self._donated, self._static = function, donated, static

    def _of(self, arguments: Sequence[Any], device: Any = None) -> Any:
        """The jitted function for arguments on a device, by default the current one."""
        models, end = arguments[0], len(arguments) - self._static
        # The models determine the shapes of parameters.
        leaves, tree = jax.tree.flatten(arguments[2:end])
        on, spread = sharding.mesh_of(arguments[1]), False
        if on and models.draft is not None:
            spread = sharding.spread(arguments[1].draft)
        shapes = tuple(map(np.shape, leaves))
        key = self, device, models, on, spread, tree, shapes, tuple(arguments[end:])
        with self._lock:
            if (jitted := self._kept.pop(key, None)) is None:
                # JAX keeps traces as long as their function lives, so each program gets its own.
                function = _laid_out(self._function, on, spread) if on else self._function
                own = functools.wraps(self._function)(functools.partial(function))
                jitted = jax.jit(
                    own,
                    static_argnums=(0, *range(end, len(arguments))),
                    donate_argnames=self._donated,
                    compiler_options=_options(*arguments, device=device) or None,
                )
            self._kept[key] = jitted
            while len(self._kept) > self.KEPT:
                self._kept.pop(next(iter(self._kept))).clear_cache()
                _trim()
        return jitted

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Runs the function on the current device; its arguments are positional."""
        assert not named
        return self._of(arguments)(*arguments)

    def lower(self, *arguments: Any, device: Any = None) -> Any:
        """Lowers like `jax.jit`, for a device that may only be described."""
        return self._of(arguments, device).lower(*arguments)

    def clear_cache(self) -> None:
        """Drops everything traced and compiled for this function."""
        with self._lock:
            for key in [key for key in self._kept if key[0] is self]:
                self._kept.pop(key).clear_cache()
