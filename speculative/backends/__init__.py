"""Backends that compute products and attention for layers: XLA, or kernels of our own."""

from typing import Any

import jax

from speculative.backends import tpu
from speculative.backends.cpu.prepacked import prepack
from speculative.backends.prepacked import PREPACKED, Prepacked
from speculative.backends.xla import (
    Attending,
    Cache,
    Norm,
    Projection,
    Weight,
    Xla,
    look_up,
)
from speculative.types import PyTree


def for_decoding(params: PyTree, draft: bool = False, platform: str | None = None) -> PyTree:
    """Parameters as the platform, by default the present one, decodes with them fastest.

    A draft's kernels are quantized on CPU, for the target verifies its guesses, and fused on TPU.
    """
    platform = platform or jax.default_backend()
    if platform == "tpu":
        return tpu.lay_out(params, draft)
    return prepack(params, quantized=draft) if platform == "cpu" else params


def compiler_options(device: Any = None) -> tuple[tuple[str, str | bool], ...]:
    """Options of the compiler for programs with a draft, on a device; by default the present one.

    There are some for TPU alone.
    """
    platform = device.platform if device else jax.default_backend()
    return tpu.compiler_options(device) if platform == "tpu" else ()


__all__ = [
    "PREPACKED", "Attending", "Cache", "Norm", "Prepacked", "Projection", "Weight", "Xla",
    "compiler_options", "for_decoding", "look_up", "prepack",
]  # fmt: skip
