"""T5X's own checkpoints: a msgpack index, and one zarr array for each parameter.

Of version 3, local or on Google Cloud Storage; the plain tree and that of scanned layers
(t5x/examples/scalable_t5). The t5x package is not needed.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorstore
from flax import serialization, traverse_util

from speculative.checkpoints.checkpoint import DTYPES, Checkpoint, Tensor, written
from speculative.models import T5Config
from speculative.types import PyTree

INDEX, VERSION = "checkpoint", 3
CHUNK_BYTES = 64 * 2**20
"""The largest chunk of an array; T5X aims at the same."""
COMPRESSOR = {"id": "gzip", "level": 1}


def kvstore(folder: str | pathlib.Path) -> dict[str, str]:
    """TensorStore's specification of a folder, a path or ``gs://bucket/path``."""
    place = str(folder).rstrip("/") + "/"
    if place.startswith("gs://"):
        bucket, _, path = place.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": path}
    return {"driver": "file", "path": str(pathlib.Path(folder).absolute()) + "/"}


def found(folder: str | pathlib.Path) -> bool:
    """Whether a folder is meant as a checkpoint of T5X: it has an index, or lies on gs://."""
    return str(folder).startswith("gs://") or (pathlib.Path(folder) / INDEX).is_file()


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a checkpoint folder (``.../checkpoint_1000``); optimiser state is left alone.

    The configuration follows from the shapes; only the distance from which all positions
    share a bucket shows in none, and is taken to be T5's 128.

    Raises:
        ValueError: the folder is no T5X checkpoint of a T5, or a tensor does not fit the others.
    """
    tree = _index(folder)
    tensors = {}
    for path, leaf in _leaves(tree):
        for name, tensor in _tensors(folder, path, leaf):
            tensors[name] = tensor
    config = infer(tensors, str(folder))
    return Checkpoint(str(folder), "t5x", config, tensors)


def infer(tensors: dict[str, Tensor], place: str) -> T5Config:
    """The configuration of a T5 from the shapes of its tensors.

    Raises:
        ValueError: they are not those of a T5.
    """

    def shape(name: str) -> tuple[int, ...]:
        if name not in tensors:
            raise ValueError(f"{place} holds no T5 encoder-decoder: it lacks the tensor {name}.")
        return tensors[name].shape

    def layers(stack: str) -> int:
        numbers = {name.split("/")[1] for name in tensors if name.startswith(f"{stack}/layers_")}
        return len(numbers)

    vocab_size, emb_dim = shape("token_embedder/embedding")
    heads, buckets = shape("decoder/relpos_bias/rel_embedding")
    width = shape("decoder/layers_0/self_attention/query/kernel")[1]
    if width % heads:
        raise ValueError(f"The queries of {place} have {width} features for {heads} heads.")
    gated = "decoder/layers_0/mlp/wi_0/kernel" in tensors
    mlp = shape(f"decoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel")
    return T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=heads,
        head_dim=width // heads,
        mlp_dim=mlp[1],
        num_encoder_layers=layers("encoder"),
        num_decoder_layers=layers("decoder"),
        mlp_activations=("gelu", "linear") if gated else ("relu",),
        logits_via_embedding="decoder/logits_dense/kernel" not in tensors,
        num_buckets=buckets,
    )


def write(
    folder: str | pathlib.Path, checkpoint: Checkpoint, dtype: str | None = None, step: int = 0
) -> None:
    """Writes a checkpoint folder, whole or not at all, one tensor in memory at a time.

    Args:
        folder: must not exist yet; T5X expects a name like ``checkpoint_1000``.
        checkpoint: what to write.
        dtype: "float32" or "bfloat16"; by default what loses nothing.
        step: of training, as the index tells it.

    Raises:
        ValueError: the folder exists, the disk is full, or the model is no encoder-decoder.
    """
    if not isinstance(checkpoint.config, T5Config):
        raise ValueError(
            f"In T5X's format there are encoder-decoders alone; {checkpoint.place} is decoder-only."
        )
    if checkpoint.config.source_dim:
        raise ValueError(f"T5X knows no model without an encoder, as {checkpoint.place} is.")
    kind = dtype or checkpoint.dtype
    target: dict[tuple[str, ...], Any] = {}
    with written(folder) as unfinished:
        for name, tensor in checkpoint.tensors.items():
            path = f"target.{name.replace('/', '.')}"
            rows = max(1, CHUNK_BYTES // max(1, 4 * int(np.prod(tensor.shape[1:]))))
            metadata = {
                "chunks": [min(tensor.shape[0], rows), *tensor.shape[1:]],
                "compressor": COMPRESSOR,
                "shape": list(tensor.shape),
            }
            leaf = {"driver": "zarr", "dtype": kind, "metadata": metadata}
            place = {"driver": "file", "path": f"{unfinished.absolute()}/{path}/"}
            array = tensorstore.open(leaf | {"kvstore": place}, create=True).result()
            array.write(checkpoint.read(name).astype(DTYPES[kind])).result()
            target[tuple(name.split("/"))] = leaf | {
                "kvstore": {"driver": "file", "path": f"{path}/"}
            }
        index = {
            "version": VERSION,
            "optimizer": {
                "target": traverse_util.unflatten_dict(target),
                "state": {"step": np.asarray(step, np.int32)},
            },
        }
        (unfinished / INDEX).write_bytes(serialization.msgpack_serialize(index))


def _index(folder: str | pathlib.Path) -> PyTree:
    """The tree of parameters in the index: TensorStore's specifications, or arrays."""
    try:
        read = tensorstore.KvStore.open(kvstore(folder)).result().read(INDEX).result()
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder}/{INDEX} cannot be read: {error}.") from error
    if read.state != "value":
        raise ValueError(f"{folder} is no T5X checkpoint: it has no file named '{INDEX}'.")
    try:
        contents = serialization.msgpack_restore(read.value)
        version, tree = contents["version"], contents["optimizer"]["target"]
    except Exception as error:  # msgpack's own errors have no common base.
        raise ValueError(f"{folder}/{INDEX} is not a T5X index: {error!r}.") from error
    if version != VERSION:
        raise ValueError(f"{folder}/{INDEX} is of version {version}; version {VERSION} is read.")
    return tree


def _leaves(tree: PyTree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, node in tree.items():
        if isinstance(node, dict) and "driver" not in node:
            yield from _leaves(node, (*path, key))
        else:
            yield (*path, key), node


def _tensors(
    folder: str | pathlib.Path, path: tuple[str, ...], leaf: Any
) -> Iterator[tuple[str, Tensor]]:
    """A leaf's tensor, or those of each layer where layers are scanned (along axis 1)."""
    name = "/".join(path)
    if not isinstance(leaf, dict):
        value = np.asarray(leaf)
        shape, dtype = value.shape, str(value.dtype)

        def read(*layer: int) -> np.ndarray:
            return np.take(value, layer[0], axis=1) if layer else value

    else:
        # T5X wrote absolute paths once; the array lies beside the index in any case.
        place = leaf["kvstore"]["path"].rstrip("/").rpartition("/")[2]
        shape, dtype = tuple(leaf["metadata"]["shape"]), leaf["dtype"]

        def read(*layer: int) -> np.ndarray:
            return _read_zarr(folder, name, place, shape, *layer)

    if path[1:2] != ("layers",):
        yield name, Tensor(shape, dtype, read)
        return
    if "relative_posemb" in path:
        raise ValueError(
            f"Every layer of {folder} has relative positions of its own ({name}), as umT5 does; "
            "such models are not supported."
        )
    for i in range(shape[1]):
        layer = "/".join((path[0], f"layers_{i}", *path[2:]))
        yield layer, Tensor((shape[0], *shape[2:]), dtype, _bound(read, i))


def _bound(read: Callable[..., np.ndarray], layer: int) -> Callable[[], np.ndarray]:
    return lambda: read(layer)


def _read_zarr(
    folder: str | pathlib.Path, name: str, place: str, shape: tuple[int, ...], *layer: int
) -> np.ndarray:
    base = kvstore(folder)
    store = {
        "driver": "zarr",
        "kvstore": base | {"path": f"{base['path']}{place}/"},
        "fill_missing_data_reads": False,  # A chunk that is missing is damage, not zeros.
    }
    try:
        array = tensorstore.open(store, read=True, open=True).result()
        if array.shape != shape:
            raise ValueError(f"it is {array.shape} on disk, but {shape} in the index")
        chosen = array[:, layer[0]] if layer else array
        if not chosen.shape:
            return np.asarray(chosen.read().result())
        # A quarter at a time: what decompressing takes is several times what comes out.
        chunk = (array.chunk_layout.read_chunk.shape or shape)[0] or shape[0]
        rows = -(-shape[0] // (4 * chunk)) * chunk
        value = np.empty(chosen.shape, chosen.dtype.numpy_dtype)
        for first in range(0, shape[0], rows):
            part = slice(first, min(first + rows, shape[0]))
            value[part] = chosen[part].read().result()
        return value
    except (ValueError, OSError) as error:
        raise ValueError(f"Tensor {name} of {folder} ({place}) cannot be read: {error}.") from error
