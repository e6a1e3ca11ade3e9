"""Backends that compute products and attention for layers: XLA, or kernels of our own."""

from typing import Any

from speculative.backends.cpu import kernels
from speculative.backends.cpu.prepacked import (
    PREPACKED,
    Compiled,
    Transposed,
    for_decoding,
    prepack,
)
from speculative.backends.xla import Cache, Dropout, Xla, look_up

STORED, TRANSPOSED, COMPILED = Xla(), Transposed(), Compiled()


def backend_of(prepacked: Any) -> Xla:
    """What computes with a prepacked kernel, or with a stored one where there is none."""
    if prepacked is None:
        return STORED
    return COMPILED if isinstance(prepacked, kernels.Panels) else TRANSPOSED


__all__ = [
    "PREPACKED", "Cache", "Dropout", "Xla", "backend_of", "for_decoding", "look_up", "prepack",
]  # fmt: skip
