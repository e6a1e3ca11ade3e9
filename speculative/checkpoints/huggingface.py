"""Hugging Face folders of transformers' T5 and GPT-2, as `architectures` describes them.

A `config.json` and weights as safetensors, in one file or in shards with an index, or as
`pytorch_model.bin`, for which torch must be installed. The transformers package is not needed.
"""

import contextlib
import json
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from speculative import vocabulary
from speculative.checkpoints import architectures
from speculative.checkpoints.architectures import SPIECE, Architecture, Stored
from speculative.checkpoints.checkpoint import (
    CONFIG,
    DTYPES,
    Checkpoint,
    Tensor,
    read_settings,
    written,
)
from speculative.checkpoints.native import read_safetensors

VOCABULARIES = (SPIECE, vocabulary.MERGES)
"""Files of a folder that hold vocabularies and end neither in .json nor in .safetensors."""
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
SHARD_BYTES = 2**30
"""The largest file that is written."""


def found(folder: str | pathlib.Path) -> bool:
    """Whether a folder is Hugging Face's: its configuration tells a type of model."""
    return "model_type" in read_settings(folder)


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a folder.

    Raises:
        ValueError: it holds another kind of model, a setting that is not supported, or no
            weights; or a tensor is missing, unknown or of the wrong shape.
    """
    folder = pathlib.Path(folder)
    kind, config = architectures.described(read_settings(folder), str(folder / CONFIG))
    table = kind.names(config)
    stored = {
        kind.prefix + name if kind.prefix + name in table else name: tensor
        for name, tensor in _stored(folder).items()
    }
    for name, original in kind.copies.items():
        if name in table and name not in stored and original in stored:
            stored[name] = stored[original]
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name in table or not kind.passed_over.fullmatch(name.removeprefix(kind.prefix)):
            tensors |= _parts(f"{name} of {folder}", tensor, table.get(name, Stored((name,))))
    if missing := [name for name in table if name not in stored]:
        raise ValueError(f"{folder} lacks the tensor {missing[0]}.")
    files = (folder / name for name in kind.vocabularies)
    return Checkpoint(
        str(folder),
        "huggingface",
        config,
        tensors,
        next((file for file in files if file.is_file()), None),
        _extra_ids(folder, kind),
    )


def write(folder: str | pathlib.Path, checkpoint: Checkpoint, dtype: str | None = None) -> None:
    """Writes a folder that transformers loads, whole or not at all.

    Args:
        folder: must not exist yet.
        checkpoint: what to write.
        dtype: "float32" or "bfloat16"; by default what loses nothing.

    Raises:
        ValueError: the folder exists, the disk is full, or transformers has no such model.
    """
    config, dtype = checkpoint.config, dtype or checkpoint.dtype
    kind = architectures.of(config)
    settings = kind.settings(config, checkpoint.place) | {"torch_dtype": dtype}
    table = kind.names(config)
    sizes = {
        name: DTYPES[dtype].itemsize
        * sum(int(np.prod(checkpoint.tensors[part].shape)) for part in stored.parts)
        for name, stored in table.items()
    }
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    with written(folder) as unfinished:
        index = {}
        for number, members in enumerate(shards, 1):
            many = f"model-{number:05}-of-{len(shards):05}.safetensors"
            file = SAFETENSORS if len(shards) == 1 else many
            values = {}
            for name in members:
                parts, transposed = table[name]
                value = np.concatenate([checkpoint.read(part) for part in parts], axis=-1)
                value = value.astype(DTYPES[dtype], copy=False)
                values[name] = np.ascontiguousarray(value.T if transposed else value)
                index[name] = file
            save_file(values, unfinished / file, metadata={"format": "pt"})
            (unfinished / file).chmod(0o644)  # safetensors makes them readable to the owner alone.
        if len(shards) > 1:
            contents = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
            _write_json(unfinished / f"{SAFETENSORS}.index.json", contents)
        _write_json(unfinished / CONFIG, settings)
        if checkpoint.vocabulary is not None:
            name = vocabulary.store(checkpoint.vocabulary, unfinished)
            tokenizer: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer"}
            if not name.endswith(".json"):
                (unfinished / name).rename(unfinished / SPIECE)
                tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": checkpoint.extra_ids}
            _write_json(unfinished / "tokenizer_config.json", tokenizer)


def _write_json(path: pathlib.Path, contents: Any) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")


def _parts(place: str, tensor: Tensor, stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """Tensors of ours, by name, in one of theirs."""
    shape = tensor.shape[::-1] if stored.transposed else tensor.shape
    parts = len(stored.parts)
    if parts > 1:
        if not shape or shape[-1] % parts:
            raise ValueError(f"Tensor {place} is {shape}, which is not {parts} side by side.")
        shape = (*shape[:-1], shape[-1] // parts)

    def reader(part: int) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            value = tensor.read()
            return np.split(value.T if stored.transposed else value, parts, axis=-1)[part]

        return read

    for i, name in enumerate(stored.parts):
        yield name, Tensor(shape, tensor.dtype, reader(i))


def _extra_ids(folder: pathlib.Path, kind: Architecture) -> int:
    with contextlib.suppress(OSError, ValueError):
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        return int(tokenizer.get("extra_ids", kind.extra_ids))
    return kind.extra_ids


def _stored(folder: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of the folder by Hugging Face's name, from the best format that is there."""
    for single, members in ((SAFETENSORS, read_safetensors), (BIN, _bin)):
        if (folder / single).is_file():
            return members(folder / single)
        index = folder / f"{single}.index.json"
        if index.is_file():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{index} is no index of shards: {error!r}.") from error
            tensors: dict[str, Tensor] = {}
            for file in sorted(set(weight_map.values())):
                if not (folder / file).is_file():
                    raise ValueError(f"{folder / file} is missing; {index} names it.")
                tensors |= members(folder / file)
            return tensors
    raise ValueError(
        f"{folder} has no weights: neither {SAFETENSORS} nor {BIN}, nor an index of shards."
    )


def _bin(path: pathlib.Path) -> dict[str, Tensor]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} can be read only where torch is installed: pip install torch, or fetch the "
            f"{SAFETENSORS} of the same model."
        ) from error
    try:
        # Mapped into memory: a tensor is read from the file when it is used.
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, OSError) as error:
        raise ValueError(
            f"{path} is no file of PyTorch weights, or is cut off: {error}."
        ) from error

    def reader(value: Any) -> Callable[[], np.ndarray]:
        return lambda: value.float().numpy()

    return {
        name: Tensor(tuple(x.shape), str(x.dtype).removeprefix("torch."), reader(x))
        for name, x in stored.items()
    }
