"""The project's own checkpoints: a folder of safetensors files and one `config.json`.

Kernels and embeddings may be stored as int8. What is read is then the model itself, not an
approximation to be hidden: target and draft are both used as read.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors asks for)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speculative.checkpoints.checkpoint import (
    CONFIG,
    DTYPES,
    Checkpoint,
    Tensor,
    in_memory,
    read_settings,
    written,
)
from speculative.models import Config, DecoderOnlyConfig, T5Config
from speculative.types import PyTree
from speculative.vocabulary import store

Storage = Literal["float32", "bfloat16", "int8"]
"""The number formats in which parameters are saved."""
FORMATS = {"speculative-t5": T5Config, "speculative-decoder-only": DecoderOnlyConfig}
"""The kinds of models, by the name of their format."""
VERSION = 1
KEYS = ("model", "sha256", "vocabulary")
"""What a description must hold besides."""
SCALE = ".scale"
"""What follows the name of an int8 tensor in the name of its scales."""
FILE_BYTES = 14 * 2**20
"""The largest file of a small model; hosts and mirrors balk at bigger files in a repository."""
BIG = 2**30
"""Models of more bytes than this are cut into files of this size."""


def quantise(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor as int8 with float32 scales, symmetric; a norm or a bias stays as it is.

    A kernel [in, out] has a scale for each output, an embedding [V, D] one for each row.
    """
    kind = name.rpartition("/")[2]
    if kind not in ("kernel", "embedding"):
        return {name: value}
    axis = 0 if kind == "kernel" else 1
    scale = np.abs(value).max(axis=axis, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return {name: np.rint(value / scale).astype(np.int8), name + SCALE: scale}


def save(
    folder: str | pathlib.Path,
    config: Config,
    params: PyTree,
    vocabulary: str | pathlib.Path | None = None,
    storage: Storage = "float32",
    extra_ids: int = 0,
) -> None:
    """Writes parameters that are in memory; see `write`.

    Args:
        folder: must not exist yet.
        config: the sizes.
        params: the parameters.
        vocabulary: the file of a vocabulary to store with them.
        storage: the number format; int8 is for kernels and embeddings.
        extra_ids: sentinels after the vocabulary's pieces.

    Raises:
        ValueError: as `write`, or the vocabulary does not exist.
    """
    path = pathlib.Path(vocabulary) if vocabulary is not None else None
    if path is not None and not path.is_file():
        raise ValueError(f"There is no vocabulary at {path}.")
    checkpoint = in_memory(str(folder), config, params, path, extra_ids)
    if storage == "int8":
        write(folder, checkpoint, quantisation="int8")
    else:
        write(folder, checkpoint, storage)


def write(
    folder: str | pathlib.Path,
    checkpoint: Checkpoint,
    dtype: str | None = None,
    quantisation: Literal["int8"] | None = None,
) -> None:
    """Writes a checkpoint folder, whole or not at all, one file in memory at a time.

    Args:
        folder: must not exist yet.
        checkpoint: what to write.
        dtype: "float32" or "bfloat16", of all tensors where none is quantised; by default what
            loses nothing.
        quantisation: "int8" for kernels and embeddings.

    Raises:
        ValueError: the folder exists, the disk is full, or a parameter is not finite.
    """
    if quantisation not in (None, "int8"):
        raise ValueError(f"quantisation must be int8 or None, not {quantisation!r}.")
    kind = DTYPES[dtype or checkpoint.dtype]
    sizes = {
        name: int(np.prod(tensor.shape)) * (1 if quantisation else kind.itemsize)
        for name, tensor in checkpoint.tensors.items()
    }
    files = _files(sizes, BIG if sum(sizes.values()) > BIG else FILE_BYTES)
    with written(folder) as unfinished:
        for i, members in enumerate(files, 1):
            tensors: dict[str, np.ndarray] = {}
            for name in members:
                value = checkpoint.read(name)
                if quantisation:
                    tensors |= quantise(name, value.astype(np.float32))
                else:
                    tensors[name] = np.ascontiguousarray(value.astype(kind))
            name = f"model-{i:05}-of-{len(files):05}" if len(files) > 1 else "model"
            path = unfinished / f"{name}.safetensors"
            save_file(tensors, path)
            path.chmod(0o644)  # safetensors makes files that only their owner can read.
        file = checkpoint.vocabulary and store(checkpoint.vocabulary, unfinished)
        description = {
            "format": _format(checkpoint.config),
            "format_version": VERSION,
            "quantisation": quantisation,
            "vocabulary": file,
            "extra_ids": checkpoint.extra_ids,
            "model": checkpoint.config.to_json(),
            "sha256": {path.name: _sha256(path) for path in sorted(unfinished.iterdir())},
        }
        (unfinished / CONFIG).write_text(json.dumps(description, indent=2) + "\n")


def load(folder: str | pathlib.Path) -> tuple[Config, PyTree]:
    """The configuration, and float32 parameters as NumPy arrays; raises as `open`."""
    checkpoint = open(folder)
    return checkpoint.config, checkpoint.numpy()


def found(folder: str | pathlib.Path) -> bool:
    """Whether a folder is meant as one of ours."""
    return "format" in read_settings(folder)


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a checkpoint folder; its files' checksums are verified first.

    Raises:
        ValueError: a file is missing or altered, or a tensor is missing, too many or of the
            wrong shape; the message names the file and the tensor.
    """
    folder = pathlib.Path(folder)
    description = _description(folder)
    try:
        config = FORMATS[description["format"]](**description["model"])
    except TypeError as error:
        raise ValueError(f"{folder / CONFIG} has a model of other fields: {error}.") from error
    stored: dict[str, Tensor] = {}
    for name, sha256 in description["sha256"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; restore it or fetch the checkpoint again.")
        if _sha256(path) != sha256:
            raise ValueError(
                f"{path} was altered or cut off: its checksum is not that of {folder / CONFIG}; "
                "fetch the checkpoint again."
            )
        if path.suffix == ".safetensors":
            stored |= read_safetensors(path)
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            continue
        tensors[name] = tensor
        if tensor.dtype == "int8":
            if name + SCALE not in stored:
                raise ValueError(f"{folder} lacks the tensor {name + SCALE}.")
            tensors[name] = _dequantised(tensor, stored[name + SCALE])
    vocabulary = description["vocabulary"]
    return Checkpoint(
        str(folder),
        "native",
        config,
        tensors,
        folder / vocabulary if vocabulary else None,
        description.get("extra_ids", 0),
    )


def _dequantised(tensor: Tensor, scale: Tensor) -> Tensor:
    return Tensor(tensor.shape, "int8", lambda: tensor.read().astype(np.float32) * scale.read())


def read_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, by name.

    Raises:
        ValueError: the file is damaged, or a tensor is of a type that no model here has.
    """
    kinds = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8"}

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            # Opened for each tensor: what is read of an open file stays in memory.
            with safe_open(path, framework="numpy") as file:
                return file.get_tensor(name)

        return read

    tensors = {}
    path.open("rb").close()  # The library takes a file that may not be read for a missing one.
    try:
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                if kind not in kinds:
                    raise ValueError(
                        f"Tensor {name} of {path} is of type {kind}; read are {', '.join(kinds)}."
                    )
                tensors[name] = Tensor(shape, kinds[kind], reader(name))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file, or is cut off: {error}.") from error
    return tensors


def _description(folder: pathlib.Path) -> dict[str, Any]:
    """What `config.json` says, with all that a checkpoint of this format needs."""
    description = read_settings(folder)
    if not description:
        raise ValueError(f"{folder} is no checkpoint folder: it has no {CONFIG}.")
    kind, version = description.get("format"), description.get("format_version")
    if kind not in FORMATS or version != VERSION:
        raise ValueError(
            f"{folder / CONFIG} is of format {kind!r}, version {version}; this program reads "
            f"version {VERSION} of {', '.join(FORMATS)}."
        )
    if missing := [key for key in KEYS if key not in description]:
        raise ValueError(f"{folder / CONFIG} lacks {missing[0]!r}; fetch the checkpoint again.")
    return description


def _format(config: Config) -> str:
    return next(name for name, kind in FORMATS.items() if isinstance(config, kind))


def _files(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into files of at most `limit` bytes where a tensor allows."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > limit - 2**17:  # Room for the header and the scales.
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
