"""Backends that compute products and attention for layers: XLA, or kernels of our own."""

import jax

from speculative.backends.cpu import kernels
from speculative.backends.cpu.prepacked import prepack
from speculative.backends.options import compiler_options, training_options
from speculative.backends.prepacked import PREPACKED, Prepacked, for_xla
from speculative.backends.tpu import lay_out, together
from speculative.backends.xla import (
    Attending,
    Cache,
    Norm,
    Projection,
    Rotation,
    Weight,
    Xla,
    look_up,
    quantized,
    quantized_on_host,
)
from speculative.types import ROUNDED, PyTree


def for_decoding(
    params: PyTree,
    draft: bool = False,
    platform: str | None = None,
    quantize: str = "none",
    shards: int | None = None,
) -> PyTree:
    """Parameters as the platform, by default the present one, decodes with them fastest.

    Kernels, and tied logits', become int8 as `quantize` says, unless they are `Weight` already. A
    draft's kernels are fused on TPU. On a mesh of devices, which share kernels in so many shards,
    XLA multiplies, for our kernels for CPU know nothing of it; without one that is None.
    """
    platform = platform or jax.default_backend()
    if platform == "tpu":
        return lay_out(params, draft, quantize, shards or 1)
    if platform == "cpu" and shards is None:
        return prepack(params, quantize)
    return for_xla(params, quantize, tied=(shards or 1) > 1)


def heads_together(size: int, platform: str | None = None) -> int:
    """How many heads of a size a platform keeps side by side, and one device must have."""
    return together(size) if (platform or jax.default_backend()) == "tpu" else 1


def usual_quantize(platform: str | None = None) -> str:
    """How a draft is held in memory where nobody says: on a CPU in int8, inputs rounded too.

    The target verifies its guesses. Without a compiler of our kernels XLA would be slower so.
    """
    cpu = (platform or jax.default_backend()) == "cpu"
    return ROUNDED if cpu and kernels.compiler() else "none"


def usual_dtype(stored: str, platform: str | None = None) -> str:
    """The number format in which weights stored in another are kept and multiplied.

    What is stored in bfloat16 stays so on accelerators. On a CPU it becomes float32, as does all
    else: most have no instructions for products in bfloat16, which take about 15 times as long.
    """
    return "float32" if (platform or jax.default_backend()) == "cpu" else stored


__all__ = [
    "PREPACKED", "Attending", "Cache", "Norm", "Prepacked", "Projection", "Rotation", "Weight",
    "Xla",
    "compiler_options", "for_decoding", "heads_together", "look_up", "prepack", "quantized",
    "quantized_on_host", "training_options", "usual_dtype", "usual_quantize",
]  # fmt: skip
