"""The project's own checkpoints: a folder of safetensors files and one `config.json`.

Kernels and embeddings may be stored as int8. What `load` gives is then the model itself, not
an approximation to be hidden: target and draft are both used as loaded.
"""

import hashlib
import json
import pathlib
import shutil
from typing import Any, Literal

import ml_dtypes
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from speculative.models import T5Config
from speculative.models.t5 import abstract_params
from speculative.types import PyTree

FORMAT, VERSION = "speculative-t5", 1
CONFIG = "config.json"
KEYS = ("model", "sha256", "vocabulary")
"""What a description must hold besides."""
SCALE = ".scale"
"""What follows the name of an int8 tensor in the name of its scales."""
FILE_BYTES = 14 * 2**20
"""The largest tensor file; hosts and mirrors balk at bigger files in a repository."""


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
    config: T5Config,
    params: PyTree,
    vocabulary: str | pathlib.Path | None = None,
    quantisation: Literal["int8"] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Writes a checkpoint folder, whole or not at all.

    Args:
        folder: must not exist yet.
        config: the sizes.
        params: T5X's tree.
        vocabulary: a SentencePiece file to store beside the weights.
        quantisation: "int8" for kernels and embeddings.
        dtype: of all tensors, where none is quantised.

    Raises:
        ValueError: the folder exists, the vocabulary does not, or a parameter does not fit
            the configuration or is not finite.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it or choose another folder.")
    if vocabulary is not None and not pathlib.Path(vocabulary).is_file():
        raise ValueError(f"There is no vocabulary at {vocabulary}.")
    if quantisation not in (None, "int8"):
        raise ValueError(f"quantisation must be int8 or None, not {quantisation!r}.")
    tensors: dict[str, np.ndarray] = {}
    for name, value in _checked(params, config, str(folder)).items():
        stored = quantise(name, value) if quantisation else {name: value}
        for key, tensor in stored.items():
            half = dtype == "bfloat16" and not quantisation
            tensors[key] = tensor.astype(ml_dtypes.bfloat16) if half else tensor
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    pieces = _pieces(tensors)
    for i, piece in enumerate(pieces, 1):
        name = f"model-{i:05}-of-{len(pieces):05}" if len(pieces) > 1 else "model"
        path = unfinished / f"{name}.safetensors"
        save_file(piece, path)
        path.chmod(0o644)  # safetensors makes files that only their owner can read.
    if vocabulary is not None:
        shutil.copy(vocabulary, unfinished / pathlib.Path(vocabulary).name)
    description = {
        "format": FORMAT,
        "format_version": VERSION,
        "quantisation": quantisation,
        "vocabulary": pathlib.Path(vocabulary).name if vocabulary is not None else None,
        "model": config.to_json(),
        "sha256": {path.name: _sha256(path) for path in sorted(unfinished.iterdir())},
    }
    (unfinished / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
    unfinished.rename(folder)


def load(folder: str | pathlib.Path) -> tuple[T5Config, PyTree]:
    """Reads a checkpoint folder: the configuration, and float32 parameters as NumPy arrays.

    Raises:
        ValueError: a file is missing or altered, or a tensor is missing, too many or of the
            wrong shape; the message names the file and the tensor.
    """
    folder = pathlib.Path(folder)
    description = describe(folder)
    try:
        config = T5Config(**description["model"])
    except TypeError as error:
        raise ValueError(f"{folder / CONFIG} has a model of other fields: {error}.") from error
    stored: dict[str, np.ndarray] = {}
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
            try:
                stored |= load_file(path)
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file: {error}.") from error
    values = {}
    for name, value in stored.items():
        if name.endswith(SCALE):
            continue
        values[name] = value.astype(np.float32)
        if value.dtype == np.int8:
            if name + SCALE not in stored:
                raise ValueError(f"{folder} lacks the tensor {name + SCALE}.")
            values[name] *= stored[name + SCALE]
    tree = traverse_util.unflatten_dict(values, sep="/")
    _checked(tree, config, str(folder))
    return config, tree


def describe(folder: str | pathlib.Path) -> dict[str, Any]:
    """What `config.json` says of a checkpoint, without reading its weights.

    Raises:
        ValueError: there is none, or it is not of this format.
    """
    path = pathlib.Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint folder: it has no {CONFIG}.")
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(description, dict):
        raise ValueError(f"{path} holds no JSON object; fetch the checkpoint again.")
    found = (description.get("format"), description.get("format_version"))
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {found}; this version reads {(FORMAT, VERSION)}.")
    if missing := [key for key in KEYS if key not in description]:
        raise ValueError(f"{path} lacks {missing[0]!r}; fetch the checkpoint again.")
    return description


def _checked(params: PyTree, config: T5Config, place: str) -> dict[str, np.ndarray]:
    """The parameters by name, each of the shape that the configuration asks for."""
    expected = _by_name(abstract_params(config))
    found = {name: np.asarray(value, np.float32) for name, value in _by_name(params).items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{place} lacks the tensor {name}.")
        if name not in expected:
            raise ValueError(f"{place} has a tensor {name}, unknown to its configuration.")
        if found[name].shape != expected[name].shape:
            raise ValueError(
                f"Tensor {name} of {place} is {found[name].shape}; its configuration asks for "
                f"{expected[name].shape}."
            )
        if not np.isfinite(found[name]).all():
            raise ValueError(f"Tensor {name} of {place} holds values that are not finite.")
    return found


def _by_name(tree: PyTree) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def _pieces(tensors: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Tensors in order, cut into files of at most `FILE_BYTES` where a tensor allows."""
    pieces: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        size = sum(t.nbytes for t in pieces[-1].values())
        if pieces[-1] and size + tensor.nbytes > FILE_BYTES - 2**17:  # Room for the header.
            pieces.append({})
        pieces[-1][name] = np.ascontiguousarray(tensor)
    return pieces


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
