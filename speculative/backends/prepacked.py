"""Parameters in two parts: the kernels as a backend lays them out, and the rest."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from speculative.backends.xla import Weight, Xla, quantized
from speculative.types import ROUNDED, PyTree

PREPACKED = "prepacked"  # The collection of prepacked weights next to a model's parameters.
GATED = ("wi_0", "wi_1")
FUSED = (("query", "key", "value"), GATED)
"""Kernels that share their input and may therefore become one product; the first match wins."""


@struct.dataclass
class Prepacked:
    """A model's parameters for decoding, and the backend that computes with them."""

    params: PyTree  # The rest, as stored.
    prepacked: PyTree  # The kernels.
    backend: Xla = struct.field(pytree_node=False)


def beside(weights: Sequence[Any], shards: int = 1) -> Any:
    """Joins kernels of the same inputs, or their biases, with their outputs side by side.

    With several shards, each one has its parts of all of them.
    """
    if len(weights) == 1:
        return weights[0]

    def joined(*parts: Array) -> Array:
        apart = [x.reshape(*x.shape[:-1], shards, -1) for x in parts]
        return jnp.concatenate(apart, axis=-1).reshape(*parts[0].shape[:-1], -1)

    return jax.tree.map(joined, *weights)


def split(
    params: PyTree,
    backend: Xla,
    groups: Sequence[tuple[str, ...]] = (),
    lay_out: Callable[..., Weight] | None = None,
    tied: bool = False,
    quantize: bool = False,
    shards: int = 1,
) -> Prepacked:
    """Splits a model's parameters for a backend.

    `lay_out` takes the names of a group of kernels that become one, and its kernels, or no names
    and one kernel, which may be the embedding if it is `tied` to the logits; by default it puts
    them `beside` one another, in `shards` parts. Kernels in int8 with scales stay so; with
    `quantize` others become int8. If an embedding computes logits in int8, its rows that are looked
    up have the same rounded values.
    """
    join = functools.partial(beside, shards=shards)
    made = lay_out or (lambda names, *weights: join(weights))

    def weight(kernel: Array | Weight, axis: int = 0) -> Weight:
        if isinstance(kernel, Weight):
            return kernel
        return quantized(kernel, axis) if quantize else Weight(kernel)

    rest, prepacked = _split(
        params, lambda names, *group: made(names, *map(weight, group)), join, groups
    )
    if "logits_dense" not in params["decoder"]:
        values, scales = weight(params["token_embedder"]["embedding"], 1)
        if scales is not None:
            dtype = params["decoder"]["decoder_norm"]["scale"].dtype
            embedding = (values * scales[:, None]).astype(dtype)
            rest["token_embedder"] = {"embedding": embedding}
        if tied or scales is not None:
            prepacked["logits"] = made((), Weight(values.T, scales))
    return Prepacked(rest, prepacked, backend)


def for_xla(params: PyTree, quantize: str, tied: bool = False) -> PyTree:
    """Parameters as XLA multiplies them: as they are stored, or in int8 if `quantize` says so.

    Logits that are `tied` get their own kernel, which several devices can share.
    """
    in_int8 = quantize != "none"
    if not (in_int8 or tied):
        return params
    return split(params, Xla(quantize == ROUNDED), tied=tied, quantize=in_int8)


def _split(
    tree: dict[str, Any],
    lay_out: Callable[..., Weight],
    join: Callable[[Sequence[Array]], Array],
    groups: Sequence[tuple[str, ...]],
    name: str = "",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rest of a tree of parameters, and its kernels laid out."""
    rest: dict[str, Any] = dict(tree)
    prepacked: dict[str, Any] = {}
    if "kernel" in tree:
        return rest, {"kernel": lay_out((), rest.pop("kernel"))}
    # A cross-attention's query reads the target, its key and value read the source.
    here = groups if name != "encoder_decoder_attention" else ()
    if fused := next((group for group in here if tree.keys() >= {*group}), ()):
        parts = [rest.pop(part) for part in fused]
        one = prepacked["_".join(fused)] = {}
        one["kernel"] = lay_out(fused, *(part["kernel"] for part in parts))
        if "bias" in parts[0]:
            one["bias"] = join([part["bias"] for part in parts])
    for part, value in [*rest.items()]:
        if isinstance(value, dict):
            rest[part], prepacked[part] = _split(value, lay_out, join, groups, part)
    return rest, prepacked
