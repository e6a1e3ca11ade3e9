"""Models on several devices: which axes of parameters and states lie along which axis of a mesh.

The axis names are T5X's. JAX's partitioner does the rest: from the shardings of parameters and
states, it derives each device's computation and the sums that they exchange.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from speculative import checks
from speculative.backends import Prepacked, Weight, Xla, heads_together
from speculative.models.config import AXES as INPUTS
from speculative.models.config import Config
from speculative.models.registry import abstract_params
from speculative.types import PyTree

DATA, MODEL = "data", "model"

ALONG: Mapping[str, str] = {
    "batch": DATA,
    "heads": MODEL,
    "joined_kv": MODEL,
    "mlp": MODEL,
    "vocab": MODEL,
}
"""The mesh axis of each logical axis; the others are whole on every device."""

IN_TRAINING: Mapping[str, str] = ALONG | {"embed": DATA}
"""`ALONG` in training, where devices with different examples share parameters and moments too."""

AXES: Mapping[str, tuple[str, ...]] = {
    # Rows are looked up on every device; XLA would gather a table sharded by tokens.
    r"(token|position)_embedder/embedding": ("tokens", "embed"),
    r"(query|key|value|query_key_value)/kernel": ("embed", "joined_kv"),
    r"(query|key|value|query_key_value)/bias": ("joined_kv",),
    r"out/kernel": ("joined_kv", "embed"),
    r"(wi|wi_0|wi_1|wi_0_wi_1)/kernel": ("embed", "mlp"),
    r"(wi|wi_0|wi_1|wi_0_wi_1)/bias": ("mlp",),
    r"wo/kernel": ("mlp", "embed"),
    r"logits_dense/kernel": ("embed", "vocab"),
    r"prepacked/logits": ("embed", "vocab"),  # Tied logits, in addition to the embedding.
    r"rel_embedding": ("heads", "relpos_buckets"),
    # A model's state (`stack.DecoderState`) and its output.
    r"(keys|values|cross/\d+)/\d+": ("batch", "heads", "length", "kv"),
    r"logits": ("batch", "length", "vocab"),
}
"""Logical axes, by the end of a name, of parameters (stored or prepacked) and states."""

_AXES = [(re.compile(f"(^|.*/){end}"), axes) for end, axes in AXES.items()]


@dataclasses.dataclass(frozen=True)
class InTraining(Xla):
    """Products and attention in training, where devices of a mesh share each batch.

    Activations are laid out by `ALONG`, so that devices gather parameters and not activations.
    Attention's scores have the type of products, as in T5X: in float32 they take as much memory
    traffic as all products of a layer. Their softmax is float32.
    """

    on: Mesh | None = None
    scores: ClassVar[Any] = None

    def along(self, x: Array, *axes: str) -> Array:
        """See `Xla.along`."""
        if self.on is None:
            return x
        where = NamedSharding(self.on, laid(axes, x.shape, self.on))
        return jax.lax.with_sharding_constraint(x, where)


def mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that a text like ``data:2,model:4`` names, of the first devices of all hosts.

    Raises ValueError if the text names other axes, or more devices than there are.
    """
    sizes, there = checks.mesh("mesh", text), jax.devices() if devices is None else devices
    shape, count = (sizes[DATA], sizes[MODEL]), sizes[DATA] * sizes[MODEL]
    if count > len(there):
        more = ""
        if there[0].platform == "cpu":
            more = f" (XLA_FLAGS=--xla_force_host_platform_device_count={count} simulates them)"
        raise ValueError(
            f"The mesh {text} needs {count} devices, and there are {len(there)}; take a smaller "
            f"mesh or more devices{more}."
        )
    if idle := {one.process_index for one in there} - {one.process_index for one in there[:count]}:
        if devices is None:
            raise ValueError(
                f"The mesh {text} leaves process {min(idle)} without devices; take a larger "
                "mesh or fewer processes (--distributed)."
            )
    chosen = np.array(there[:count])  # In numerical order.
    with contextlib.suppress(NotImplementedError, ValueError, AssertionError):
        # Neighbours on a mesh are neighbours on the chips' links, where possible.
        chosen = mesh_utils.create_device_mesh(shape, there[:count], allow_split_physical_axes=True)
    return Mesh(chosen.reshape(shape), (DATA, MODEL))


def padded(config: Config, shards: int, platform: str | None = None) -> Config:
    """The same model with heads, features and vocabulary padded for `shards` devices to share.

    The padding is zero, at the end of an axis, and changes nothing: a head without queries, keys,
    values and outputs, a feature that no output reads, a token beyond the vocabulary.
    """

    def whole(size: int, multiple: int = shards) -> int:
        return -(-size // multiple) * multiple

    if shards == 1:
        return config
    heads = whole(config.kv_heads, shards * heads_together(config.head_dim, platform))
    queries = heads * (config.num_heads // config.kv_heads)
    changes = {"num_heads": queries, "mlp_dim": whole(config.mlp_dim)}
    if config.num_kv_heads:
        changes["num_kv_heads"] = heads
    if not config.reads.draft_vocabulary:
        changes["vocab_size"] = whole(config.vocab_size)
    return config.replace(**changes)


def spec(
    name: str,
    shape: Sequence[int],
    on: Mesh | AbstractMesh,
    table: Mapping[str, str] = ALONG,
) -> PartitionSpec:
    """The layout of an array of this name; axes that devices cannot share evenly stay whole."""
    # int8 values are laid out like their kernel, and scales like its outputs.
    match = re.fullmatch(r"(.*)/(values|scales)", name)
    known = _named(name) or (match and _named(match[1])) or ()
    if match and match[2] == "scales":
        known = known[-1:]
    return laid(known, shape, on, table) if len(known) == len(shape) else PartitionSpec()


def laid(
    axes: Sequence[str],
    shape: Sequence[int],
    on: Mesh | AbstractMesh,
    table: Mapping[str, str] = ALONG,
) -> PartitionSpec:
    """The layout of an array with these logical axes, by a table of axes such as `ALONG`."""
    along = [table.get(axis) for axis in axes]
    fits = [
        axis if axis and size % on.shape[axis] == 0 else None
        for axis, size in zip(along, shape, strict=True)
    ]
    return PartitionSpec(*fits)


def shared(name: str, shape: Sequence[int], parts: int) -> bool:
    """Whether `parts` devices share a parameter of this name."""
    return MODEL in spec(name, shape, AbstractMesh((1, parts), (DATA, MODEL)))


def _named(name: str) -> tuple[str, ...] | None:
    return next((axes for end, axes in _AXES if end.fullmatch(name)), None)


def shardings(tree: PyTree, on: Mesh, whole: bool = False, draft: bool = False) -> PyTree:
    """The layout on a mesh of the arrays of parameters, a state or a result, by their names.

    Every device holds all arrays whole if `whole`, and the draft's arrays whole unless `draft`.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        same = whole or (not draft and "draft" in name.split("/"))
        return NamedSharding(on, PartitionSpec() if same else spec(name, leaf.shape, on))

    return jax.tree_util.tree_map_with_path(of, tree)


def of_training(tree: PyTree, on: Mesh) -> PyTree:
    """The layout in training of parameters (T5X's names), or of an optimizer's state for them.

    Adafactor's factors of a matrix, `v_row` without its longest axis and `v_col` without the other
    one, are laid out like the remaining axis.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in leaves]
    shapes = {name: leaf.shape for name, leaf in named if leaf.ndim == 2}

    def of(name: str, leaf: Any) -> NamedSharding:
        match = re.fullmatch(r".*/(v_row|v_col)/(.*)", name)
        shape = next((shapes[x] for x in shapes if match and x.endswith(f"/{match[2]}")), None)
        axes = _named(match[2]) if match else None
        if match is None or shape is None or axes is None or leaf.size == 1:
            return NamedSharding(on, spec(name, leaf.shape, on, IN_TRAINING))
        kept = int(np.argsort(shape, kind="stable")[0 if match[1] == "v_row" else 1])
        return NamedSharding(on, laid(axes[kept : kept + 1], leaf.shape, on, IN_TRAINING))

    return jax.tree.unflatten(jax.tree.structure(tree), [of(*one) for one in named])


def places(tree: PyTree, on: Mesh | None) -> PyTree:
    """`of_training` on a mesh; without one, everything on the first device of this process."""
    if on is not None:
        return of_training(tree, on)
    one = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda _: one, tree)


def placed(config: Config, on: Mesh | None, whole: bool = False, training: bool = False) -> PyTree:
    """Shapes of a configuration's parameters as they are read, with their layout on a mesh.

    Those of `Config.in_int8` are `Weight`. Every device holds its part of each or, if `whole`, all
    of it; if `training`, its part is that of `of_training`.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not config.in_int8(name):
            return jax.ShapeDtypeStruct(leaf.shape, config.dtype)
        outputs = leaf.shape[1 - INPUTS[name.rpartition("/")[2]]]
        values = jax.ShapeDtypeStruct(leaf.shape, np.int8)
        return Weight(values, jax.ShapeDtypeStruct((outputs,), np.float32))

    shapes = jax.tree_util.tree_map_with_path(of, abstract_params(config))
    if on is None:
        return shapes
    return laid_out(shapes, of_training(shapes, on)) if training else at(shapes, on, whole)


def at(shapes: PyTree, on: Mesh, whole: bool = False, draft: bool = False) -> PyTree:
    """Shapes of parameters or a state, with their layout on a mesh; see `shardings`."""
    return laid_out(shapes, shardings(shapes, on, whole, draft))


def laid_out(shapes: PyTree, where: PyTree) -> PyTree:
    """Shapes of arrays, laid out by a tree of shardings."""
    return jax.tree.map(
        lambda leaf, on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on), shapes, where
    )


def mesh_of(params: PyTree) -> Mesh | None:
    """The mesh of several devices on which parameters lie, or will lie; None without one.

    It looks at only one array, as all share a mesh and every dispatch of a program calls it.
    """
    one = params
    while isinstance(one, dict | tuple | Prepacked):
        if isinstance(one, Prepacked):
            one = one.params
        else:
            one = next(iter(one.values() if isinstance(one, dict) else one), None)
    on = getattr(one, "sharding", None)
    if isinstance(on, NamedSharding) and on.mesh.size > 1:
        return on.mesh  # pyright: ignore[reportReturnType]
    return None


def spread(params: PyTree) -> bool:
    """Whether some of the parameters differ from device to device."""
    return any(
        isinstance(on := getattr(leaf, "sharding", None), NamedSharding)
        and not on.is_fully_replicated
        for leaf in jax.tree.leaves(params)
    )


def bytes_a_device(tree: PyTree) -> int:
    """The bytes that each device holds of arrays, or of shapes with shardings."""

    def size(leaf: Any) -> int:
        on = getattr(leaf, "sharding", None)
        shape = on.shard_shape(leaf.shape) if on else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
