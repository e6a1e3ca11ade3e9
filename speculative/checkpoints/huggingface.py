"""Hugging Face folders of all families, whose `names` map their tensors to ours.

Weights are safetensors, or `pytorch_model.bin`, which needs torch; transformers is not needed.
"""

import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import logging

from speculative.checkpoints import tokens
from speculative.checkpoints.checkpoint import (
    CONFIG,
    DTYPES,
    Checkpoint,
    Part,
    Tensor,
    plain,
    read_settings,
    require_layers,
    write_tensors,
    written,
)
from speculative.checkpoints.native import read_safetensors
from speculative.disk import read_json, reading
from speculative.models import FAMILIES, names_of
from speculative.models.names import SPIECE, Stored
from speculative.types import Fields
from speculative.vocabulary import BYTES, from_elsewhere, open_vocabulary

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
TOKENIZER, BYTES_CLASS = "tokenizer_config.json", "ByT5Tokenizer"
SHARD_BYTES = 2**29  # The largest file, all of which is in memory while it is written.
# Advice for checkpoints in other programs' quantized formats.
INSTEAD = (
    "Fetch the checkpoint that it was made from, and hold that in int8 (--quantize=int8, or "
    "convert it once: speculative convert --to native --dtype int8)."
)
Tensors = dict[str, Tensor]  # By Hugging Face's names.


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a folder; ValueError if a setting or a tensor is missing, unknown or not supported."""
    folder = pathlib.Path(folder)
    settings, path = read_settings(folder), str(folder / CONFIG)
    model = settings.get("model_type")
    readable = [family.names for family in FAMILIES.values() if family.names.model_types]
    kind = next((names for names in readable if model in [*names.model_types]), None)
    if kind is None or not model:
        known = " and ".join(f"{kind.title} ({', '.join(kind.model_types)})" for kind in readable)
        raise ValueError(f"{path} is of a {model!r} model; only {known} are read.")
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ValueError(
            f"{path} has a quantization_config: its tensors were quantized by {method or 'others'}"
            f", whose formats are not read. {INSTEAD}"
        )
    with reading(path):
        settings, of_text = kind.of_text(settings)
    stored, left_out = _of_text(_stored(folder), of_text)
    stored = {
        name if name in kind.tied or name.startswith(kind.prefix) else kind.prefix + name: tensor
        for name, tensor in stored.items()
    }
    for name in [*filter(kind.of_images.fullmatch, stored)]:
        del stored[name]
        left_out += 1
    for copy, original in kind.tied.items():  # Any of them may be the one that is stored.
        if copy in stored:
            stored.setdefault(original, stored[copy])

    def own(name: str) -> bool:
        tensor, original = stored.get(name), stored.get(kind.tied[name])
        if tensor is None or original is None or tensor is original:
            return False
        return tensor.shape != original.shape or not np.array_equal(tensor.read(), original.read())

    with reading(path):
        config = kind.configuration(settings, own, path)
    require_layers(config, len(stored), folder)
    table = kind.names(config)
    for copy in kind.filled:
        if copy in table and (original := kind.tied[copy]) in stored:
            stored.setdefault(copy, stored[original])
    tensors_of: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name in table or not kind.passed_over.fullmatch(name.removeprefix(kind.prefix)):
            tensors_of |= _parts(f"{name} of {folder}", tensor, table.get(name, Stored((name,))))
    if lacking := [name for name in table if name not in stored]:
        raise ValueError(f"{folder} lacks the tensor {lacking[0]}.")
    tokenizer: Fields = read_json(file) if (file := folder / TOKENIZER).is_file() else {}
    special, note = tokens.read(folder, settings, bool(config.encoder_layers))
    if left_out:
        note = f"{folder} reads more than text; {left_out} tensors for that are left out. {note}"
    if {**settings, **tokenizer}.get("tokenizer_class") == BYTES_CLASS:
        # Its own count of sentinels becomes 0 when transformers saves it again.
        vocabulary = pathlib.Path(BYTES)
        extra_ids = from_elsewhere(vocabulary, config.vocab_size).extra_ids
    else:
        files = (folder / name for name in kind.vocabularies)
        vocabulary = next((file for file in files if file.is_file()), None)
        extra_ids = tokenizer.get("extra_ids")
        if extra_ids is None:  # The usual ones, unless the embedding has no rows for them.
            extra_ids = kind.model_types[model]
            if extra_ids and vocabulary is not None and vocabulary.name == SPIECE:
                with reading(vocabulary):
                    pieces = open_vocabulary(vocabulary).size
                extra_ids = extra_ids if pieces + extra_ids <= config.vocab_size else 0
        if vocabulary is not None and vocabulary.suffix == ".json":
            extra_ids = 0  # The sentinels are among its pieces.
    fields = str(folder), "huggingface", config, tensors_of, vocabulary, extra_ids, special
    return Checkpoint(*fields, note=note)


def write(folder: str | pathlib.Path, checkpoint: Checkpoint, dtype: str | None = None) -> None:
    """Writes a folder for transformers, as `native.write` writes ours.

    Raises ValueError also if transformers has no such model.
    """
    config, dtype = checkpoint.config, dtype or checkpoint.dtype
    kind = names_of(config)
    settings = kind.settings(config, checkpoint.location) | {"torch_dtype": dtype}
    vocabulary = checkpoint.open_vocabulary()
    ids, of_tokens = tokens.written(checkpoint.special, vocabulary, bool(config.encoder_layers))
    settings |= ids
    table = kind.names(config)
    counts = {name: math.prod(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    sizes = {
        name: DTYPES[dtype].itemsize * sum(counts[part] for part in stored.parts)
        for name, stored in table.items()
    }

    def values(name: str) -> dict[str, np.ndarray]:
        parts, transposed = table[name]
        read = [checkpoint.read(part) for part in parts]
        value = read[0] if len(read) == 1 else np.concatenate(read, axis=-1)
        value = value.astype(DTYPES[dtype], copy=False)
        return {name: value.T if transposed else value}

    descriptions: dict[str, dict[str, Any]] = {}
    with written(folder) as unfinished:
        if name := checkpoint.store_vocabulary(unfinished):
            kept = {"extra_ids": checkpoint.extra_ids}
            if name == BYTES:
                tokenizer = {"tokenizer_class": BYTES_CLASS} | kept
            elif name.endswith(".json"):
                of_bytes = vocabulary is not None and vocabulary.of_bytes
                kind = "GPT2Tokenizer" if of_bytes else "PreTrainedTokenizerFast"
                tokenizer = {"tokenizer_class": kind}
            else:
                (unfinished / name).rename(unfinished / SPIECE)
                tokenizer = {"tokenizer_class": "T5Tokenizer"} | kept
            descriptions[TOKENIZER] = {**tokenizer, **of_tokens}
        index = write_tensors(unfinished, sizes, SHARD_BYTES, values, {"format": "pt"})
        if len(set(index.values())) > 1:
            contents = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
            descriptions[f"{SAFETENSORS}.index.json"] = contents
        # The file that makes the folder a checkpoint comes last.
        for name, contents in (descriptions | {CONFIG: settings}).items():
            (unfinished / name).write_text(json.dumps(contents, indent=2) + "\n")


def _of_text(stored: Tensors, prefix: str) -> tuple[Tensors, int]:
    """The tensors whose names have a prefix, now without it, and the number of the others.

    Some versions of transformers put the prefix before `model.`, others after it.
    """
    if not prefix:
        return stored, 0
    pattern = re.compile(rf"(?:{prefix}\.(model\.|lm_head\.)|(model\.){prefix}\.|(lm_head\.))(.*)")
    named = ((pattern.fullmatch(name), tensor) for name, tensor in stored.items())
    kept = {"".join(filter(None, match.groups())): tensor for match, tensor in named if match}
    return kept, len(stored) - len(kept)


def _parts(described: str, tensor: Tensor, stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """The native tensors, by name, that a Hugging Face tensor holds."""
    shape = tensor.shape[::-1] if stored.transposed else tensor.shape
    parts = len(stored.parts)
    if parts > 1:
        if not shape or shape[-1] % parts:
            raise ValueError(f"Tensor {described} is {shape}, which does not split into {parts}.")
        shape = (*shape[:-1], shape[-1] // parts)

    def read(number: int, part: Part = ()) -> np.ndarray:
        if parts > 1:  # Take the columns of this part.
            *rows, columns = part or tuple(slice(0, size) for size in shape)
            first = number * shape[-1]
            part = *rows, slice(first + columns.start, first + columns.stop)
        value = tensor.read(part[::-1] if stored.transposed else part)
        return value.T if stored.transposed else value

    for i, name in enumerate(stored.parts):
        yield name, Tensor(shape, tensor.dtype, functools.partial(read, i))


def _stored(folder: pathlib.Path) -> Tensors:
    """Every tensor of the folder by Hugging Face's name, from the best format present."""
    for single, read in ((SAFETENSORS, read_safetensors), (BIN, _read_bin)):
        if (folder / single).is_file():
            return read(folder / single)
        if (index := folder / f"{single}.index.json").is_file():
            return _sharded(index, read)
    raise ValueError(
        f"{folder} has no weights: neither {SAFETENSORS} nor {BIN}, nor an index of shards."
    )


def _sharded(index: pathlib.Path, read: Callable[[pathlib.Path], Tensors]) -> Tensors:
    """Every tensor of the shards, from the one that the index assigns it to."""
    with reading(index, "is no index of shards"):
        assigned = {
            name: plain(shard, index) for name, shard in read_json(index)["weight_map"].items()
        }
    tensors: Tensors = {}
    for shard in sorted({*assigned.values()}):
        path = index.parent / shard
        if not path.is_file():
            raise ValueError(f"{path} is missing; {index} names it.")
        contents = read(path)
        if lacking := [
            name for name, place in assigned.items() if place == shard and name not in contents
        ]:
            raise ValueError(
                f"{path} lacks the tensor {lacking[0]}, which {index} assigns to it; fetch both "
                "again."
            )
        copies = [name for name in contents if assigned.get(name, shard) != shard]
        if copies:
            more = f" and copies of {len(copies) - 1} more" if copies[1:] else ""
            logging.warning(
                "%s holds a copy of %s%s; tensors are read from the file that %s names.",
                path, copies[0], more, index,
            )  # fmt: skip
        if twice := [name for name in contents if name in tensors and name not in assigned]:
            raise ValueError(
                f"{path} and another file of {index.parent} hold the tensor {twice[0]}, and "
                f"{index} does not say which one is right; fetch them again."
            )
        tensors |= {name: contents[name] for name in contents if name not in copies}
    return tensors


def _read_bin(path: pathlib.Path) -> Tensors:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} can be read only where torch is installed: pip install torch, or fetch the "
            f"{SAFETENSORS} of the same model."
        ) from error
    with reading(path, "holds no PyTorch weights, or is cut off"):
        # A tensor of a mapped file is read when it is used.
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def tensor(value: Any) -> Tensor:
        dtype = str(value.dtype).removeprefix("torch.")
        read = lambda part=(): value[part].float().numpy()  # noqa: E731
        return Tensor(tuple(value.shape), dtype, read)

    with reading(path, "holds other things than tensors"):
        return {name: tensor(value) for name, value in stored.items()}
