"""Exact speculative decoding in JAX (Leviathan et al., arXiv 2211.17192)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculative.loading import load
    from speculative.pair import Pair, Result
    from speculative.sampling import Sampling
    from speculative.settings import Settings

__all__ = ["Pair", "Result", "Sampling", "Settings", "load"]
__version__ = "0.1.0"

_HOMES = {"Pair": "pair", "Result": "pair", "Sampling": "sampling"}
_HOMES |= {"Settings": "settings", "load": "loading"}


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that the command line can answer before JAX is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
