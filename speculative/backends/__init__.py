"""Backends that compute products and attention for layers: XLA, or kernels of our own."""

from typing import Any

import jax

from speculative.backends.cpu import kernels
from speculative.backends.cpu.prepacked import Compiled, Transposed, prepack
from speculative.backends.prepacked import PREPACKED
from speculative.backends.tpu import DraftKernel, Kernel, Tpu, TpuDraft, lay_out
from speculative.backends.xla import Cache, Dropout, Xla, look_up
from speculative.types import PyTree

STORED, TRANSPOSED, COMPILED = Xla(), Transposed(), Compiled()
TPU, TPU_DRAFT = Tpu(), TpuDraft()


def backend_of(prepacked: Any) -> Xla:
    """What computes with a prepacked kernel, or with a stored one where there is none."""
    if prepacked is None:
        return STORED
    if isinstance(prepacked, Kernel | DraftKernel):
        return TPU if isinstance(prepacked, Kernel) else TPU_DRAFT
    return COMPILED if isinstance(prepacked, kernels.Panels) else TRANSPOSED


def for_decoding(params: PyTree, draft: bool = False, platform: str | None = None) -> PyTree:
    """Parameters as the platform, by default the present one, decodes with them fastest.

    A draft's kernels are quantized on CPU, for the target verifies its guesses, and fused on TPU.
    """
    platform = platform or jax.default_backend()
    if platform == "tpu":
        return lay_out(params, draft)
    return prepack(params, quantized=draft) if platform == "cpu" else params


__all__ = [
    "PREPACKED", "Cache", "Dropout", "Xla", "backend_of", "for_decoding", "look_up", "prepack",
]  # fmt: skip
