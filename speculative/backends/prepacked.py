"""Parameters in two parts: the kernels as a backend lays them out, and what stays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from speculative.backends.xla import Weight, Xla
from speculative.types import PyTree

PREPACKED = "prepacked"  # The collection of prepacked weights beside a model's parameters.
GATED = ("wi_0", "wi_1")
FUSED = (("query", "key", "value"), GATED)
"""Kernels that share their input, and so may become one product; the first match wins."""


@struct.dataclass
class Prepacked:
    """A model's parameters for decoding, and the backend that computes with them."""

    params: PyTree  # What stays as it is stored.
    prepacked: PyTree  # The kernels.
    backend: Xla = struct.field(pytree_node=False)


def split(
    params: PyTree,
    backend: Xla,
    lay_out: Callable[..., Weight],
    groups: Sequence[tuple[str, ...]],
    tied: Callable[[Array], Weight | None],
) -> Prepacked:
    """A model's parameters for a backend.

    `lay_out` is given the names of a group of kernels that become one, and its kernels; or no names
    and one kernel. `tied` is given the embedding of a model whose logits are tied to it.
    """
    rest, prepacked = _split(params, lay_out, groups)
    if "logits_dense" not in params["decoder"]:
        prepacked["logits"] = tied(params["token_embedder"]["embedding"])
    return Prepacked(rest, prepacked, backend)


def _split(
    tree: dict[str, Any],
    lay_out: Callable[..., Weight],
    groups: Sequence[tuple[str, ...]],
    name: str = "",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stays of a tree of parameters, and its kernels laid out."""
    rest: dict[str, Any] = {}
    prepacked: dict[str, Any] = {}
    denses = {part for part, value in tree.items() if isinstance(value, dict) and "kernel" in value}
    # A cross-attention's query sees the target, its key and value the source.
    here = groups if name != "encoder_decoder_attention" else ()
    fused = next((group for group in here if denses.issuperset(group)), ())
    if fused:
        kernel = lay_out(fused, *(tree[part]["kernel"] for part in fused))
        biases = [tree[part]["bias"] for part in fused if "bias" in tree[part]]
        prepacked["_".join(fused)] = {"kernel": kernel}
        if biases:
            prepacked["_".join(fused)]["bias"] = jnp.concatenate(biases)
    for part, value in tree.items():
        if part in denses:
            if part not in fused:
                prepacked[part] = {"kernel": lay_out((), value["kernel"])}
                rest |= {part: {"bias": value["bias"]}} if "bias" in value else {}
        elif isinstance(value, dict):
            inner_rest, inner_prepacked = _split(value, lay_out, groups, part)
            rest |= {part: inner_rest} if inner_rest else {}
            prepacked |= {part: inner_prepacked} if inner_prepacked else {}
        else:
            rest[part] = value
    return rest, prepacked
