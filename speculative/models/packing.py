"""Kernels laid out for decoding: fused where they share an input, in the order of their reading.

A small model is bound by the number of operations, so query, key and value become one
product, as do the two inputs of a gated feed-forward layer; `kernels` says why the order
matters.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from speculative.models import kernels
from speculative.models.layers import BIAS, PACKED
from speculative.types import PyTree

LaidOut = Array | kernels.Panels | kernels.Gated

GATED = ("wi_0", "wi_1")
FUSED = (("query", "key", "value"), GATED)
"""Kernels that share their input, and so become one product; the first match wins."""


def pack(params: PyTree, rounded: bool = False) -> PyTree:
    """The same parameters for decoding: {"params": what stays, "packed": the kernels}.

    With `rounded`, kernels become int8 with a scale for each output where `kernels` serves.
    """
    lay_out = functools.partial(_laid_out, rounded=rounded)
    rest, packed = jax.jit(functools.partial(_pack, lay_out=lay_out))(params)
    if "logits_dense" not in params["decoder"]:
        embedding = params["token_embedder"]["embedding"]
        packed["logits"] = jax.jit(lambda kernel: lay_out((), kernel))(embedding.T)
    return {"params": rest, PACKED: packed}


def for_decoding(params: PyTree, rounded: bool = False) -> PyTree:
    """Packs on CPU; GPUs and TPUs take kernels as they are."""
    return pack(params, rounded) if jax.default_backend() == "cpu" else params


def _pack(
    tree: dict[str, Any], lay_out: Callable[..., LaidOut], name: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    rest: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    # A cross-attention's query sees the target, its key and value the source.
    fused = next(
        (
            group
            for group in FUSED
            if all(_is_kernel(tree.get(part)) for part in group)
            and name != "encoder_decoder_attention"
        ),
        (),
    )
    if fused:
        joined = "_".join(fused)
        packed[joined] = lay_out(fused, *(tree[part]["kernel"] for part in fused))
        if "bias" in tree[fused[0]]:
            packed[joined + BIAS] = jnp.concatenate([tree[part]["bias"] for part in fused])
    for part, value in tree.items():
        if part in fused:
            continue
        if _is_kernel(value):
            packed[part] = {"kernel": lay_out((), value["kernel"])}
            if "bias" in value:
                rest[part] = {"bias": value["bias"]}
        elif isinstance(value, dict):
            inner_rest, inner_packed = _pack(value, lay_out, part)
            rest |= {part: inner_rest} if inner_rest else {}
            packed |= {part: inner_packed} if inner_packed else {}
        else:
            rest[part] = value
    return rest, packed


def _laid_out(fused: tuple[str, ...], *group: Array, rounded: bool) -> LaidOut:
    """Kernels [in, out] as panels for `kernels`, or as one [out, in] for XLA's products."""
    if kernels.native() and fused == GATED:
        return kernels.gated_panels(*group, rounded=rounded)
    kernel = jnp.concatenate(group, axis=1)
    return kernels.panels(kernel, rounded) if kernels.native() else kernel.T


def _is_kernel(value: dict[str, Any] | Array | None) -> bool:
    return isinstance(value, dict) and "kernel" in value
