"""The project's own checkpoints: a folder of safetensors files and one `config.json`.

Kernels and embeddings may be stored as int8; the dequantized values are then the model.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
from safetensors import safe_open

from speculative.backends import Weight, quantized_on_host
from speculative.checkpoints.checkpoint import (
    CONFIG,
    DTYPES,
    Checkpoint,
    Checksums,
    MadeFor,
    Part,
    Tensor,
    in_memory,
    plain,
    read_settings,
    write_tensors,
    written,
)
from speculative.disk import reading
from speculative.fingerprints import sha256
from speculative.models import FAMILIES, Config, format_of
from speculative.models.config import AXES
from speculative.special_tokens import SpecialTokens
from speculative.types import Fields, PyTree
from speculative.vocabulary import BYTES

Storage = Literal["float32", "bfloat16", "int8"]  # The number formats in which models are saved.
VERSION = 1
CHECKSUM = "checksum"  # The entry with the description's own checksum; the oldest have none.
SCALE = ".scale"  # The end of the name of an int8 tensor's scales.
FILE_BYTES = 14 * 2**20  # A small model's largest file: some repository hosts refuse more.
BIG = 2**30  # Models with more bytes have larger files.
BIG_FILE_BYTES = 2**27  # A whole file is in memory while it is written.
# The number formats that are read, by their names in safetensors.
KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I8": "int8"}


def quantize(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor as int8 with float32 scales, symmetric; a norm or a bias stays as it is.

    A kernel [in, out] has a scale for each output, an embedding [V, D] one for each row.
    """
    if (axis := AXES.get(name.rpartition("/")[2])) is None:
        return {name: value}
    values, scales = quantized_on_host(value, axis)
    return {name: values, name + SCALE: np.expand_dims(scales, axis)}


def checksum(description: Fields) -> str:
    """SHA-256, in hexadecimal, of a `config.json`'s entries except its own checksum."""
    entries = {key: value for key, value in description.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def save(
    folder: str | pathlib.Path,
    config: Config,
    params: PyTree,
    vocabulary: str | pathlib.Path | None = None,
    storage: Storage = "float32",
    extra_ids: int = 0,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008
    made_for: MadeFor | None = None,
    training_minutes: float | None = None,
) -> None:
    """Writes parameters that are in memory, see `write`, and a copy of a vocabulary file."""
    path = pathlib.Path(vocabulary) if vocabulary else None
    if path and path.name != BYTES and not path.is_file():
        raise ValueError(f"There is no vocabulary at {path}.")
    made = dataclasses.replace(
        in_memory(str(folder), config, params),
        vocabulary=path,
        extra_ids=extra_ids,
        special=special,
        made_for=made_for,
        training_minutes=training_minutes,
    )
    write(folder, made, storage)


def write(folder: str | pathlib.Path, checkpoint: Checkpoint, storage: str | None = None) -> None:
    """Writes a new folder, whole or not at all, with the tensors of one file in memory at a time.

    `storage` is one of `Storage`, by default the format that loses nothing; int8 stores kernels
    and embeddings in int8, and the other tensors in float32. Raises ValueError if the folder
    exists or a parameter is not finite, and OSError if the disk is full.
    """
    storage = storage or checkpoint.dtype
    kind = np.dtype(np.int8) if storage == "int8" else DTYPES[storage]
    sizes = {name: math.prod(x.shape) * kind.itemsize for name, x in checkpoint.tensors.items()}
    limit = BIG_FILE_BYTES if sum(sizes.values()) > BIG else FILE_BYTES

    def values(name: str) -> dict[str, np.ndarray]:
        value = checkpoint.read(name)
        if storage == "int8":
            return quantize(name, value.astype(np.float32))
        return {name: value.astype(kind, copy=False)}

    with written(folder) as unfinished:
        vocabulary = checkpoint.store_vocabulary(unfinished)
        # The limit is lower here, because the header and the scales need space too.
        write_tensors(unfinished, sizes, limit - 2**17, values)
        description: dict[str, Any] = {
            "format": format_of(checkpoint.config),
            "format_version": VERSION,
            "quantisation": "int8" if storage == "int8" else None,
            "vocabulary": vocabulary,
            "extra_ids": checkpoint.extra_ids,
            "model": checkpoint.config.to_json(),
            "sha256": {path.name: sha256(path) for path in sorted(unfinished.iterdir())},
        }
        if special := checkpoint.special.to_json():
            description["special_tokens"] = special
        if checkpoint.made_for:
            description["made_for"] = checkpoint.made_for._asdict()
        if checkpoint.training_minutes is not None:
            description["training_minutes"] = checkpoint.training_minutes
        description[CHECKSUM] = checksum(description)
        (unfinished / CONFIG).write_text(json.dumps(description, indent=2) + "\n")


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a checkpoint folder; a file's checksum is verified when it is first read from.

    Raises ValueError if a file is missing, or if a tensor is missing, unknown or of the wrong
    shape; the message names it, or says that a file was altered if that is the cause.
    """
    folder = pathlib.Path(folder)
    where = folder / CONFIG
    if not (description := read_settings(folder)):
        raise ValueError(f"{folder} is no checkpoint folder: it has no {CONFIG}.")
    kind, version = description.get("format"), description.get("format_version")
    if kind not in [*FAMILIES] or version != VERSION:
        raise ValueError(
            f"{where} is of format {kind!r}, version {version}; this program reads "
            f"version {VERSION} of {', '.join(FAMILIES)}."
        )
    if description.get(CHECKSUM, computed := checksum(description)) != computed:
        raise ValueError(
            f"{where} was altered: its checksum is not that of its contents; fetch the checkpoint "
            "again."
        )
    if lacking := [key for key in ("model", "sha256", "vocabulary") if key not in description]:
        raise ValueError(f"{where} lacks {lacking[0]!r}; fetch the checkpoint again.")
    with reading(where, "describes no model"):
        config = FAMILIES[kind].config.from_json(description["model"])
    with reading(where, "lists no files and checksums"):
        listed = description["sha256"].items()
        recorded = {folder / plain(name, where): sha256 for name, sha256 in listed}
    name, extra_ids = description["vocabulary"], description.get("extra_ids", 0)
    vocabulary = None if name is None else folder / plain(name, where)
    if vocabulary in recorded and not vocabulary.exists():
        shared = folder.parent / vocabulary.name  # Checkpoints in neighbouring folders share it.
        if shared.is_file():
            recorded[shared], vocabulary = recorded.pop(vocabulary), shared
    if lost := [path for path in recorded if not path.is_file()]:
        raise ValueError(f"{lost[0]} is missing; restore it or fetch the checkpoint again.")
    vocabulary = pathlib.Path(BYTES) if name == BYTES else vocabulary
    missing = "" if CHECKSUM in description else f" but {CONFIG}, as older versions wrote it"
    checksums = Checksums(recorded, f"of every file{missing}")
    with reading(where, "has malformed special_tokens"):
        special = SpecialTokens.from_json(description.get("special_tokens", {}))
    with reading(where, "has a malformed made_for"):
        entry = description.get("made_for")
        made_for = entry and MadeFor(entry["name"], tuple(map(float, entry["fingerprint"])))
    with reading(where, "has malformed training_minutes"):
        minutes = description.get("training_minutes")
        minutes = None if minutes is None else float(minutes)
    try:
        tensors = _tensors(folder, checksums, recorded)
        kept = str(folder), "native", config, tensors, vocabulary, extra_ids, special, checksums
        return Checkpoint(*kept, made_for, minutes)
    except ValueError:
        for path in recorded:
            checksums.verify(path)
        raise


def _tensors(
    folder: pathlib.Path, checksums: Checksums, paths: Iterable[pathlib.Path]
) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files, dequantized when they are read."""
    stored: dict[str, Tensor] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            stored |= read_safetensors(path, functools.partial(checksums.verify, path))

    def dequantized(name: str) -> Tensor:
        tensor, scale = stored[name], stored.get(name + SCALE)
        if tensor.dtype != "int8":
            return tensor
        if scale is None:
            raise ValueError(f"{folder} lacks the tensor {name + SCALE}.")
        axis = AXES.get(name.rpartition("/")[2], 1)
        if scale.shape != tuple(1 if i == axis else n for i, n in enumerate(tensor.shape)):
            raise ValueError(
                f"Tensor {name + SCALE} of {folder} is {scale.shape}, which are no scales for "
                f"{tensor.shape}."
            )

        def of_scale(part: Part) -> Part:
            return tuple(slice(None) if i == axis else one for i, one in enumerate(part))

        def read(part: Part = ()) -> np.ndarray:
            return tensor.read(part).astype(np.float32) * scale.read(of_scale(part))

        def whole(part: Part = ()) -> Weight:
            scales = scale.read(of_scale(part)).astype(np.float32)
            return Weight(tensor.read(part), scales.reshape(-1))

        return tensor._replace(read=read, quantized=whole)

    return {name: dequantized(name) for name in stored if not name.endswith(SCALE)}


def read_safetensors(
    path: pathlib.Path, verify: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, by name; `verify` is called before values are read.

    Raises ValueError if the file is damaged.
    """

    def read(name: str, part: Part = ()) -> np.ndarray:
        verify()
        # The file is opened for each tensor: pages read from an open file stay in memory.
        with reading(path), safe_open(path, framework="numpy") as file:
            return file.get_slice(name)[part] if part else file.get_tensor(name)

    tensors = {}
    with reading(path, "is no safetensors file, or is cut off"):
        path.open("rb").close()  # The library reports a file without permission as missing.
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                # Other formats are refused where a model uses them: see `Checkpoint`.
                dtype = KINDS.get(kind, str(kind))
                tensors[name] = Tensor(shape, dtype, functools.partial(read, name))
    return tensors
