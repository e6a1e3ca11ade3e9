"""T5X checkpoints of version 3: a msgpack index, and one zarr array for each parameter.

Scanned layers, as in scalable_t5 and Flaxformer's umT5, are read; t5x itself is not needed.
"""

import functools
import math
import pathlib
from typing import Any

import numpy as np
import tensorstore
from absl import logging
from flax import serialization, traverse_util

from speculative.checkpoints.checkpoint import DTYPES, FLOATS, Checkpoint, Tensor, plain, written
from speculative.disk import reading
from speculative.models import FAMILIES, names_of
from speculative.types import EOS_ID, PAD_ID

INDEX, VERSION = "checkpoint", 3
WAIT, WAIT_FOR_VALUES = 8, 600
"""Seconds for a bucket's answer, and for a part of a tensor; TensorStore tries for much longer."""
MOST_LAYERS = 1000  # Scanned layers that are read; an index may claim any number.
CHUNK_BYTES = 64 * 2**20  # The largest chunk of an array; T5X aims at the same.


def kvstore(folder: str | pathlib.Path) -> dict[str, str]:
    """TensorStore's specification of a folder, a path or ``gs://bucket/path``."""
    url = str(folder).rstrip("/") + "/"
    if url.startswith("gs://"):
        bucket, _, path = url.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": path}
    return {"driver": "file", "path": str(pathlib.Path(folder).resolve()) + "/"}


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a checkpoint folder (``.../checkpoint_1000``); the optimizer's state is not read.

    The configuration follows from the tensors' shapes; for the rest see `T5Names.infer`.
    Raises ValueError if the folder is not a T5X checkpoint of a T5, or a tensor does not fit.
    """
    tensors, index = {}, f"{folder}/{INDEX}"
    with reading(index):
        store = _answer(tensorstore.KvStore.open(kvstore(folder)), folder, WAIT)
        read = _answer(store.read(INDEX), folder, WAIT)
    if read.state != "value":
        raise ValueError(f"{folder} is no T5X checkpoint: it has no file named '{INDEX}'.")
    with reading(index, "is not a T5X index"):
        contents = serialization.msgpack_restore(read.value)
        version, tree = contents["version"], contents["optimizer"]["target"]
        leaves = traverse_util.flatten_dict(tree, is_leaf=lambda _, node: "driver" in node)
    if version != VERSION:
        raise ValueError(f"{index} is of version {version}; version {VERSION} is read.")
    with reading(index):
        for path, leaf in leaves.items():  # TensorStore's specifications, or arrays.
            tensors |= _tensors(folder, path, leaf)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    # T5 comes last: it finds a configuration, or raises an error that says what is missing.
    configs = (family.names.infer(shapes, str(folder)) for family in reversed(FAMILIES.values()))
    return Checkpoint(str(folder), "t5x", next(filter(None, configs)), tensors)


def write(folder: str | pathlib.Path, checkpoint: Checkpoint, dtype: str | None = None) -> None:
    """Writes like `native.write`; raises ValueError also if the model is no encoder-decoder.

    T5X expects a folder name like ``checkpoint_1000``. The index has training step 0.
    """
    names_of(checkpoint.config).require_t5x(checkpoint.config, checkpoint.location)
    special = checkpoint.special
    usual = (("start", PAD_ID, [special.start_id or PAD_ID]), ("end", EOS_ID, special.eos_ids))
    for name, read, ids in usual:
        if other := [token for token in ids if token != read]:
            raise ValueError(
                f"{checkpoint.location} has the {name} token {other[0]}, which T5X's format does "
                f"not hold: it would be read as {read}; write another format (--to native, "
                "huggingface)."
            )
    if special.added:
        logging.warning(
            "T5X's format holds no added tokens; %s has %s that are left out: %s.",
            *(checkpoint.location, len(special.added)),
            ", ".join(repr(token.content) for token in special.added[:5]),
        )
    kind = dtype or checkpoint.dtype
    target: dict[str, Any] = {}
    with written(folder) as unfinished:
        for name, tensor in checkpoint.tensors.items():
            path = f"target.{name.replace('/', '.')}"
            rows = max(1, CHUNK_BYTES // max(1, 4 * math.prod(tensor.shape[1:])))
            metadata = {
                "chunks": [min(tensor.shape[0], rows), *tensor.shape[1:]],
                "compressor": {"id": "gzip", "level": 1},
                "shape": list(tensor.shape),
            }
            leaf = {"driver": "zarr", "dtype": kind, "metadata": metadata}
            spec = leaf | {"kvstore": kvstore(unfinished / path)}
            array = tensorstore.open(spec, create=True).result()
            array.write(checkpoint.read(name).astype(DTYPES[kind], copy=False)).result()
            target[name] = leaf | {"kvstore": {"driver": "file", "path": f"{path}/"}}
        tree = traverse_util.unflatten_dict(target, sep="/")
        optimizer = {"target": tree, "state": {"step": np.asarray(0, np.int32)}}
        index = {"version": VERSION, "optimizer": optimizer}
        (unfinished / INDEX).write_bytes(serialization.msgpack_serialize(index))


def _tensors(folder: str | pathlib.Path, path: tuple[str, ...], leaf: Any) -> dict[str, Tensor]:
    """A leaf's tensor by name, or one for each layer if layers are scanned (along axis 1)."""
    name = "/".join(path)
    if isinstance(leaf, dict):
        # Older versions of T5X wrote absolute paths; the array is always next to the index.
        array = plain(leaf["kvstore"]["path"].rstrip("/").rpartition("/")[2], f"{folder}/{INDEX}")
        shape, dtype = tuple(leaf["metadata"]["shape"]), leaf["dtype"]
        read = functools.partial(_read_zarr, folder, name, array, shape)
    else:
        value = np.asarray(leaf)
        shape, dtype, read = value.shape, str(value.dtype), value.__getitem__
    if path[1:2] not in (("layers",), path[:1]):  # The latter is `encoder/encoder/mlp/…`.
        return {name: Tensor(shape, dtype, lambda part=(): read(part or ...))}
    if shape[1] > MOST_LAYERS:
        raise ValueError(f"{folder}/{INDEX} has {shape[1]} layers; at most {MOST_LAYERS} are read.")
    parts = ["relative_posemb" if part == "relpos_bias" else part for part in path[2:]]
    layer = shape[0], *shape[2:]
    if len(layer) == 3:  # Flaxformer has an axis for heads: [D, N, H], and [N, H, D] in `out`.
        a, b, c = layer
        layer = (a * b, c) if "out" in parts else (a, b * c)
    return {
        "/".join((path[0], f"layers_{i}", *parts)): Tensor(
            layer, dtype, lambda part=(), i=i: read(np.s_[:, i]).reshape(layer)[part]
        )
        for i in range(shape[1])
    }


def _read_zarr(
    folder: str | pathlib.Path, name: str, path: str, shape: tuple[int, ...], index: Any
) -> np.ndarray:
    """The part of an array that a NumPy index selects, as in `value[index]`."""
    store = {
        "driver": "zarr",
        "kvstore": kvstore(f"{str(folder).rstrip('/')}/{path}"),
        "fill_missing_data_reads": False,  # A missing chunk is damage, not zeros.
    }
    with reading(f"Tensor {name} of {folder} ({path})"):
        array = _answer(tensorstore.open(store, read=True, open=True), folder, WAIT)
        if array.shape != shape or array.dtype.name not in FLOATS:
            stored = f"{array.shape} of {array.dtype.name}"
            raise ValueError(f"it is {stored} on disk, but {shape} in the index")
        chunks = array.chunk_layout.read_chunk.shape or shape
        if any((chunk or 0) > size for chunk, size in zip(chunks, shape, strict=True)):
            raise ValueError(f"its chunks of {chunks} are larger than itself, {shape}")
        chosen = array[index][tensorstore.d[:].translate_to[0]]
        # Read a quarter at a time: decompressing takes several times the memory of its result.
        chunk, length = chunks[0] or shape[0], chosen.shape[0]
        rows = -(-length // (4 * chunk)) * chunk
        value = np.empty(chosen.shape, chosen.dtype.numpy_dtype)
        for first in range(0, length, rows):
            part = slice(first, min(first + rows, length))
            value[part] = _answer(chosen[part].read(), folder, WAIT_FOR_VALUES)
        return value


def _answer(future: tensorstore.Future[Any], folder: str | pathlib.Path, seconds: float) -> Any:
    """TensorStore's answer; TimeoutError names the folder if no answer comes."""
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        raise TimeoutError(
            f"{folder} cannot be read: no answer within {seconds} seconds; check the "
            "network connection."
        ) from None
