"""Backends that compute products and attention for layers: XLA, or kernels of our own."""

import jax

from speculative.backends.cpu.prepacked import prepack
from speculative.backends.options import compiler_options
from speculative.backends.prepacked import PREPACKED, Prepacked
from speculative.backends.tpu import lay_out
from speculative.backends.xla import Attending, Cache, Norm, Projection, Weight, Xla, look_up
from speculative.types import PyTree


def for_decoding(params: PyTree, draft: bool = False, platform: str | None = None) -> PyTree:
    """Parameters as the platform, by default the present one, decodes with them fastest.

    A draft's kernels are quantized on CPU, for the target verifies its guesses, and fused on TPU.
    """
    platform = platform or jax.default_backend()
    if platform == "tpu":
        return lay_out(params, draft)
    return prepack(params, quantized=draft) if platform == "cpu" else params


def usual_dtype(stored: str, platform: str | None = None) -> str:
    """The number format in which weights stored in another are kept and multiplied.

    What is stored in bfloat16 stays so on accelerators. On a CPU it becomes float32, as does all
    else: most have no instructions for products in bfloat16, which take about 15 times as long.
    """
    return "float32" if (platform or jax.default_backend()) == "cpu" else stored


__all__ = [
    "PREPACKED", "Attending", "Cache", "Norm", "Prepacked", "Projection", "Weight", "Xla",
    "compiler_options", "for_decoding", "look_up", "prepack", "usual_dtype",
]  # fmt: skip
