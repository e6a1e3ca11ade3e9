"""Backends that compute products and attention for layers: XLA, or our own kernels."""

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
    """Lays parameters out for the fastest decoding on a platform, by default the present one.

    Kernels, including those of tied logits, become int8 if `quantize` says so, unless they are
    `Weight` already. A draft's kernels are fused on TPU. `shards` is the number of parts in which a
    mesh of devices shares kernels, None without a mesh; on a mesh XLA computes the products,
    because our CPU kernels do not support it.
    """
    platform = platform or jax.default_backend()
    if platform == "tpu":
        return lay_out(params, draft, quantize, shards or 1)
    if platform == "cpu" and shards is None:
        return prepack(params, quantize)
    return for_xla(params, quantize, tied=(shards or 1) > 1)


def heads_together(size: int, platform: str | None = None) -> int:
    """The number of heads of a size that a platform keeps side by side on one device."""
    return together(size) if (platform or jax.default_backend()) == "tpu" else 1


def usual_quantize() -> str:
    """The default quantization of a draft: on a CPU int8, with inputs rounded too.

    That may change guesses, but the target verifies them. Without a compiler for our kernels it is
    "none", because XLA is slower in int8.
    """
    cpu = jax.default_backend() == "cpu"
    return ROUNDED if cpu and kernels.compiler() else "none"


def usual_dtype(stored: str) -> str:
    """The number format for keeping and multiplying weights, given their stored format.

    On accelerators bfloat16 is kept. On a CPU all weights become float32: most CPUs have no
    instructions for products in bfloat16, which take about 15 times as long.
    """
    return "float32" if jax.default_backend() == "cpu" else stored


__all__ = [
    "PREPACKED", "Attending", "Cache", "Norm", "Prepacked", "Projection", "Rotation", "Weight",
    "Xla",
    "compiler_options", "for_decoding", "heads_together", "look_up", "prepack", "quantized",
    "quantized_on_host", "training_options", "usual_dtype", "usual_quantize",
]  # fmt: skip
