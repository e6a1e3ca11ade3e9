"""Programs of a pair, compiled with what the compiler of the device needs to be told."""

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


def bytes_of(tree: PyTree) -> int:
    """The bytes of arrays, or of arrays of which there are shapes only."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _options(models: Any, params: PyTree, *_: Any, device: Any = None) -> dict[str, str | bool]:
    reads_ahead = models.draft is not None or bytes_of(params) > LARGE
    in_int8 = [x for x in jax.tree.leaves(params) if getattr(x, "dtype", None) == np.int8]
    wide = any(bytes_of(kernel) > WIDE for kernel in in_int8)
    return dict(compiler_options(reads_ahead, wide, device))


def _lying(function: Callable[..., T], on: Mesh, spread: bool) -> Callable[..., T]:
    """The function, with results that lie on a mesh as `sharding.shardings` says."""

    def own(*given: Any) -> T:
        found = function(*given)
        where = sharding.shardings(found, on, draft=spread)
        return jax.lax.with_sharding_constraint(found, where)

    return own


class Program(Generic[P, T]):
    """A jitted function whose first arguments are a pair's models, a static one, and parameters.

    It is `jax.jit` of the function but for the compiler's options, which are those of
    `backends.compiler_options`; in that on several devices results lie as `sharding.shardings` says
    of their names; and in that it forgets: of all that was compiled for other models, settings and
    shapes, the `KEPT` programs last used are kept.
    """

    # Costs are timed in turns with up to 19 programs (`tune`); batches with two of each size, and
    # two that begin texts.
    KEPT = 24
    _kept: ClassVar[dict[tuple[Any, ...], Any]] = {}  # Jitted functions; the last used one is last.
    _lock = threading.Lock()

    def __init__(
        self, function: Callable[P, T], donated: tuple[str, ...] = (), static: int = 0
    ) -> None:
        """A program of the function.

        The arguments named `donated` are given away; as many of the last as `static` says are
        static, and hashable.
        """
        functools.update_wrapper(self, function)
        self._function, self._donated, self._static = function, donated, static

    def _of(self, given: Sequence[Any], device: Any = None) -> Any:
        """The jitted function for arguments on a device, by default the present one."""
        models, end = given[0], len(given) - self._static
        # Parameters are as large as their model says.
        leaves, tree = jax.tree.flatten(given[2:end])
        on, spread = sharding.mesh_of(given[1]), False
        if on and models.draft is not None:
            spread = sharding.spread(given[1].draft)
        shapes = tuple(map(np.shape, leaves))
        key = self, device, models, on, spread, tree, shapes, tuple(given[end:])
        with self._lock:
            if (jitted := self._kept.pop(key, None)) is None:
                # A function of its own, or JAX would keep what it traced for as long as this one.
                function = _lying(self._function, on, spread) if on else self._function
                own = functools.wraps(self._function)(functools.partial(function))
                jitted = jax.jit(
                    own,
                    static_argnums=(0, *range(end, len(given))),
                    donate_argnames=self._donated,
                    compiler_options=_options(*given, device=device) or None,
                )
            self._kept[key] = jitted
            while len(self._kept) > self.KEPT:
                self._kept.pop(next(iter(self._kept))).clear_cache()
                _trim()
        return jitted

    def __call__(self, *given: P.args, **named: P.kwargs) -> T:
        """Runs the function on the present device; its arguments come by position."""
        assert not named
        return self._of(given)(*given)

    def lower(self, *given: Any, device: Any = None) -> Any:
        """What `jax.jit`'s `lower` gives, for a device that may be described only."""
        return self._of(given, device).lower(*given)

    def clear_cache(self) -> None:
        """Forgets what was traced and compiled of this function."""
        with self._lock:
            for key in [key for key in self._kept if key[0] is self]:
                self._kept.pop(key).clear_cache()
