"""Reading checkpoints written by T5X: a msgpack index and one zarr array a parameter."""

import pathlib
from typing import Any

import numpy as np
import tensorstore
from flax import serialization

from speculative.types import PyTree


def load(folder: str | pathlib.Path) -> PyTree:
    """The parameters of a T5X checkpoint folder (``.../checkpoint_1000``), as NumPy arrays.

    Optimiser state is skipped. The tree is T5X's own: ``decoder/layers_0/...``.

    Raises:
        ValueError: the folder is no T5X checkpoint, or a parameter in it cannot be read.
    """
    folder = pathlib.Path(folder)
    index = folder / "checkpoint"
    if not index.is_file():
        raise ValueError(f"{folder} is no T5X checkpoint: it has no file named 'checkpoint'.")
    try:
        tree = serialization.msgpack_restore(index.read_bytes())["optimizer"]["target"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not a T5X index of version 3: {error!r}.") from error
    return _read(tree, folder, "target")


def _read(node: Any, folder: pathlib.Path, name: str) -> Any:
    if isinstance(node, dict) and "driver" in node:
        return _read_zarr(node, folder, name)
    if isinstance(node, dict):
        return {key: _read(value, folder, f"{name}.{key}") for key, value in node.items()}
    return np.asarray(node)


def _read_zarr(spec: dict[str, Any], folder: pathlib.Path, name: str) -> np.ndarray:
    path = folder / spec["kvstore"]["path"]
    store = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    try:
        array = tensorstore.open(store, read=True, open=True).result()
    except ValueError as error:
        raise ValueError(f"Parameter {name} of {folder} cannot be opened: {error}.") from error
    shape = tuple(spec["metadata"]["shape"])
    if array.shape != shape:
        raise ValueError(f"Parameter {name} of {folder} is {array.shape} on disk, not {shape}.")
    return np.asarray(array.read().result())
