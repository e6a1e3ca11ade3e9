"""A checkpoint of any format: its configuration, and its tensors, which are read one by one."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from speculative.models import Config, abstract_params
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary, open_vocabulary, store

CONFIG = "config.json"  # It describes a model, in our folders and in Hugging Face's.
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The number formats in which checkpoints are written."""


class Tensor(NamedTuple):
    """A tensor that is not read yet."""

    shape: tuple[int, ...]  # In T5X's orientation: kernels are [in, out].
    dtype: str  # As stored: "float32", "bfloat16", "float16" or "int8".
    read: Callable[[], np.ndarray]  # Returns the values, in a floating-point format.


def read_settings(folder: str | pathlib.Path) -> dict[str, Any]:
    """The contents of a folder's `config.json`, empty without one; ValueError if it is damaged."""
    path = pathlib.Path(folder) / CONFIG
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch the checkpoint again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; fetch the checkpoint again.")
    return found


def sha256(path: pathlib.Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Checksums:
    """The SHA-256 of files, each computed once, when it is first needed."""

    def __init__(self, recorded: Mapping[pathlib.Path, str] = {}) -> None:
        """`recorded` holds the checksums that files must have."""
        self._recorded, self.sha256 = recorded, functools.cache(sha256)

    def verify(self, path: pathlib.Path) -> None:
        """Raises ValueError if a file's checksum differs from the recorded one."""
        if path in self._recorded and self.sha256(path) != self._recorded[path]:
            raise ValueError(
                f"{path} was altered or cut off: its checksum is not that of "
                f"{path.with_name(CONFIG)}; fetch the checkpoint again."
            )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; raises ValueError unless its tensors fit its configuration."""

    location: str  # The folder or address, for messages.
    format: str  # "native", "t5x" or "huggingface".
    config: Config
    tensors: Mapping[str, Tensor]  # By T5X's names, "/" between their parts.
    vocabulary: pathlib.Path | None = None  # The vocabulary's file beside the weights.
    extra_ids: int = 0  # Sentinel tokens after the vocabulary's pieces; T5's own has 100.
    checksums: Checksums = dataclasses.field(default_factory=Checksums)

    def __post_init__(self) -> None:
        expected = by_name(abstract_params(self.config))
        where = self.location
        for name in sorted(expected.keys() | self.tensors.keys()):
            if name not in self.tensors:
                raise ValueError(f"{where} lacks the tensor {name}.")
            if name not in expected:
                raise ValueError(f"{where} has a tensor {name}, unknown to its configuration.")
            if self.tensors[name].shape != expected[name].shape:
                raise ValueError(
                    f"Tensor {name} of {where} is {self.tensors[name].shape}; its "
                    f"configuration asks for {expected[name].shape}."
                )

    @property
    def dtype(self) -> str:
        """The number format in which a copy loses nothing."""
        stored = {tensor.dtype for tensor in self.tensors.values()}
        return "bfloat16" if stored == {"bfloat16"} else "float32"

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def read(self, name: str) -> np.ndarray:
        """A tensor's values; raises ValueError if they cannot be read or are not finite."""
        value = self.tensors[name].read()
        # The sum of finite values hardly ever overflows, and needs no array of flags.
        if not np.isfinite(np.sum(value, dtype=np.float64)):
            raise ValueError(f"Tensor {name} of {self.location} holds values that are not finite.")
        return value

    def numpy(self) -> PyTree:
        """All parameters as T5X's tree of float32 NumPy arrays."""
        values = {name: self.read(name).astype(np.float32) for name in self.tensors}
        return traverse_util.unflatten_dict(values, sep="/")

    def load(self, dtype: str) -> PyTree:
        """All parameters on JAX's device as T5X's tree, in the number format `dtype`.

        The host's memory holds one tensor at a time, which is cast before it leaves the host.
        """

        def loaded(name: str) -> jax.Array:
            # A copy: on CPU a view would keep the host's array, and the file it is of, in memory.
            value = self.read(name).astype(DTYPES[dtype])
            return jax.block_until_ready(jax.device_put(value, may_alias=False))

        values = {name: loaded(name) for name in self.tensors}
        return traverse_util.unflatten_dict(values, sep="/")

    def open_vocabulary(self) -> Vocabulary | None:
        """The vocabulary, if there is one; raises ValueError if its file is altered or damaged."""
        if self.vocabulary is None:
            return None
        self.checksums.verify(self.vocabulary)
        return open_vocabulary(self.vocabulary, self.extra_ids)

    def store_vocabulary(self, folder: pathlib.Path) -> str | None:
        """Copies the vocabulary, if there is one, into a folder; returns its file's name there."""
        if self.vocabulary is None:
            return None
        self.checksums.verify(self.vocabulary)
        return store(self.vocabulary, folder)


def in_memory(
    location: str,
    config: Config,
    params: PyTree,
    vocabulary: pathlib.Path | None = None,
    extra_ids: int = 0,
) -> Checkpoint:
    """A checkpoint of parameters that are in memory already."""
    tensors = {
        name: Tensor(x.shape, str(x.dtype), functools.partial(np.asarray, x))
        for name, x in by_name(params).items()
    }
    return Checkpoint(location, "native", config, tensors, vocabulary, extra_ids)


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree of parameters by name, "/" between the parts."""
    return dict(traverse_util.flatten_dict(tree, sep="/"))


@contextlib.contextmanager
def written(folder: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, which becomes `folder` when the block ends, or is removed if it fails.

    Raises ValueError if the folder exists already or the disk is full.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it or choose another folder.")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if "No space left" in str(error):
            raise ValueError(
                f"The disk is full: {folder} could not be written and nothing of it was kept; "
                "free some space or choose another folder."
            ) from error
        raise
    unfinished.rename(folder)


def write_tensors(
    folder: pathlib.Path,
    sizes: Mapping[str, int],
    limit: int,
    values: Callable[[str], dict[str, np.ndarray]],
    metadata: dict[str, str] | None = None,
) -> dict[str, str]:
    """Writes safetensors files of at most `limit` bytes, unless one tensor alone is larger.

    The tensors of one file are in memory at a time. `sizes` holds the bytes of each tensor by
    name, in the order of writing; `values` returns the arrays to store for a name. The result is
    the file of each name: `model.safetensors`, or one of several.
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = {}
    for number, names in enumerate(shards, 1):
        part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        path = folder / f"model{part}.safetensors"
        arrays = (item for name in names for item in values(name).items())
        save_file({key: np.ascontiguousarray(x) for key, x in arrays}, path, metadata)
        path.chmod(0o644)  # safetensors makes files that only their owner can read.
        files |= dict.fromkeys(names, path.name)
    return files
