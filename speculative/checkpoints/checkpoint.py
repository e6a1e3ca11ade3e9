"""A checkpoint of any format: its configuration, and its tensors, each read when it is wanted."""

import contextlib
import dataclasses
import errno
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
from jax import Array

from speculative.models import Config, abstract_params
from speculative.types import PyTree

CONFIG = "config.json"
"""The file that describes a model, in our folders and in Hugging Face's."""
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The number formats in which checkpoints are written."""


class Tensor(NamedTuple):
    """A tensor that is not read yet.

    Attributes:
        shape: in T5X's orientation: kernels are [in, out].
        dtype: as stored: "float32", "bfloat16", "float16", "int8".
        read: its values, of the shape and in a floating-point format.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def read_settings(folder: str | pathlib.Path) -> dict[str, Any]:
    """What the `config.json` of a folder holds; nothing where there is none.

    Raises:
        ValueError: it is damaged.
    """
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


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose tensors fit its configuration.

    Attributes:
        place: where it is, for messages.
        format: "native", "t5x" or "huggingface".
        config: the sizes.
        tensors: by T5X's names, "/" between their parts.
        vocabulary: the vocabulary's file beside the weights, if there is one.
        extra_ids: sentinel tokens after the vocabulary's pieces; T5's own has 100.
        notes: what was assumed when it was opened.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape than the configuration's.
    """

    place: str
    format: str
    config: Config
    tensors: Mapping[str, Tensor]
    vocabulary: pathlib.Path | None = None
    extra_ids: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        expected = by_name(abstract_params(self.config))
        for name in sorted(expected.keys() | self.tensors.keys()):
            if name not in self.tensors:
                raise ValueError(f"{self.place} lacks the tensor {name}.")
            if name not in expected:
                raise ValueError(f"{self.place} has a tensor {name}, unknown to its configuration.")
            if tuple(self.tensors[name].shape) != expected[name].shape:
                raise ValueError(
                    f"Tensor {name} of {self.place} is {tuple(self.tensors[name].shape)}; its "
                    f"configuration asks for {expected[name].shape}."
                )

    @property
    def dtype(self) -> str:
        """In which format to write it elsewhere so that nothing is lost."""
        stored = {tensor.dtype for tensor in self.tensors.values()}
        return "bfloat16" if stored == {"bfloat16"} else "float32"

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def read(self, name: str) -> np.ndarray:
        """A tensor's values.

        Raises:
            ValueError: it cannot be read, or holds values that are not finite.
        """
        value = self.tensors[name].read()
        # The sum of finite values overflows next to never, and needs no array of flags.
        if not np.isfinite(np.sum(value, dtype=np.float64)):
            raise ValueError(f"Tensor {name} of {self.place} holds values that are not finite.")
        return value

    def numpy(self) -> PyTree:
        """All parameters as T5X's tree of float32 NumPy arrays."""
        values = {name: self.read(name).astype(np.float32) for name in self.tensors}
        return traverse_util.unflatten_dict(values, sep="/")

    def load(self, dtype: str, place: Callable[[str, np.ndarray], Array] | None = None) -> PyTree:
        """All parameters on their device, T5X's tree, one tensor in the host's memory at a time.

        Args:
            dtype: "float32" or "bfloat16"; each tensor is cast before it leaves the host.
            place: puts a tensor, given its name and values, where it belongs; by default on
                JAX's default device.
        """
        values = {}
        for name in self.tensors:
            value = self.read(name).astype(DTYPES[dtype])
            # A copy: on CPU a view would keep the host's array, and its format's file, alive.
            placed = place(name, value) if place else jax.device_put(value, may_alias=False)
            values[name] = jax.block_until_ready(placed)
            del value  # Not while the next one is read.
        return traverse_util.unflatten_dict(values, sep="/")


def in_memory(
    place: str,
    config: Config,
    params: PyTree,
    vocabulary: pathlib.Path | None = None,
    extra_ids: int = 0,
) -> Checkpoint:
    """A checkpoint of parameters that are there already."""

    def tensor(value: Any) -> Tensor:
        return Tensor(tuple(value.shape), str(value.dtype), lambda: np.asarray(value))

    tensors = {name: tensor(value) for name, value in by_name(params).items()}
    return Checkpoint(place, "native", config, tensors, vocabulary, extra_ids)


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree of parameters by name, "/" between the parts."""
    return dict(traverse_util.flatten_dict(tree, sep="/"))


@contextlib.contextmanager
def written(folder: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, which becomes `folder` when the block ends, or vanishes if it fails.

    Raises:
        ValueError: the folder exists already, or the disk is full.
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
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if full or "No space left" in str(error):
            raise ValueError(
                f"The disk is full: {folder} could not be written and nothing of it was kept; "
                "make room or choose another place."
            ) from error
        raise
    unfinished.rename(folder)
