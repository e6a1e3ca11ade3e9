"""Checkpoints in three formats (native, T5X, Hugging Face) and conversion between them."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import get_args

import numpy as np

from speculative import removed
from speculative.backends import usual_dtype
from speculative.checkpoints import huggingface, native, t5x
from speculative.checkpoints.checkpoint import (
    CONFIG,
    DTYPES,
    Checkpoint,
    narrowed,
    read_settings,
    vacant,
)
from speculative.checkpoints.tokens import TEMPLATE
from speculative.disk import reading
from speculative.models import SIZES
from speculative.models.names import SPIECE
from speculative.models.rotary_names import TOKENIZER_MODEL
from speculative.vocabulary import MERGES, from_elsewhere

ASSETS = pathlib.Path(__file__).parent.parent / "assets"
SHIPPED = {
    f"debian_{name}": ASSETS / name
    for name in (*("target", "draft_hidden", "draft"), *("lm", "lm_draft_hidden", "lm_draft"))
}
"""The models bundled with the package: a target and a language model, each with its drafts."""

FORMATS: Mapping[str, ModuleType] = {"native": native, "t5x": t5x, "huggingface": huggingface}

__all__ = ["ASSETS", "FORMATS", "SHIPPED", "Checkpoint", "convert", "describe", "known", "open"]


def open(name: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint without reading its tensors.

    The `name` is a folder in any format, ``gs://bucket/folder`` in T5X's, a bundled model's name,
    or a Hugging Face id (``google/t5-v1_1-small``), whose files come from the hub or its cache.
    Raises ValueError if there is none, or if it is damaged; the message names the file.
    """
    _require_no_gguf(str(name))
    location = _located(str(name))
    with reading(location):
        settings = read_settings(location)
        if "format" in settings:
            return native.open(location)
        if location.startswith("gs://") or (pathlib.Path(location) / t5x.INDEX).is_file():
            return t5x.open(location)
        if "model_type" in settings:
            return huggingface.open(location)
    files = sorted(path.name for path in pathlib.Path(location).iterdir())[:5]
    raise ValueError(
        f"{location} is no checkpoint: it has neither a native nor a Hugging Face config.json, "
        f"nor T5X's index '{t5x.INDEX}'; it holds {', '.join(files) or 'nothing'}."
    )


def _require_no_gguf(name: str) -> None:
    """Raises ValueError for a llama.cpp file, or a folder that has one but no `config.json`."""
    path = pathlib.Path(name)
    files = [path, *(path.glob("*.gguf") if path.is_dir() else ())]
    gguf = next((path for path in files if path.suffix == ".gguf" and path.is_file()), None)
    if gguf and not (pathlib.Path(name) / CONFIG).is_file():
        raise ValueError(f"{gguf} is a GGUF file, which is not read. {huggingface.INSTEAD}")


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """Describes a checkpoint without loading its tensors; ValueError if a file was altered."""
    config, folder = checkpoint.config, pathlib.Path(checkpoint.location)
    named = [name for name, sizes in SIZES.items() if sizes == config.replace(dtype=sizes.dtype)]
    kinds = collections.Counter(tensor.dtype for tensor in checkpoint.tensors.values())
    vocabulary = "none next to the weights"
    if pieces := checkpoint.open_vocabulary():
        vocabulary = f"{pieces.path.name}, {pieces.size - pieces.extra_ids:,} pieces"
        vocabulary += f" and {pieces.extra_ids} sentinels" if pieces.extra_ids else ""
    minutes = checkpoint.training_minutes
    training = {} if minutes is None else {"training": f"{minutes:.0f} minutes"}
    family, layers = config.description()
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        checkpoint.checksums.verify(path)
        whole.update(bytes.fromhex(checkpoint.checksums.sha256(path)))
    return {
        "checkpoint": checkpoint.location,
        "format": checkpoint.format,
        "family": family + (f", the sizes of {named[0]}" if named else ""),
        "layers": layers,
        "sizes": f"{config.emb_dim} features, {config.num_heads} heads of {config.head_dim}, "
        f"feed-forward {config.mlp_dim:,}, {config.vocab_size:,} embeddings",
        "parameters": f"{checkpoint.parameters:,}",
        **training,
        "stored as": ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.items()),
        "computed in": f"{usual_dtype(checkpoint.dtype)} on this device, unless --dtype is given",
        "vocabulary": vocabulary,
        "checksums": checkpoint.checksums.extent,
        "fingerprint": f"{checkpoint.contents}, recorded in results",
        "sha256": whole.hexdigest() if folder.is_dir() else "not computed for a remote folder",
    }


def known(name: str) -> bool:
    """Whether `open` may find a checkpoint with this name; a Hugging Face id is not looked up."""
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    return name in SHIPPED or name.startswith("gs://") or hub or os.path.isdir(name)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    dtype: str | None = None,
    vocabulary: str | os.PathLike[str] | None = None,
    tokens: Sequence[int] | np.ndarray | None = None,
) -> Checkpoint:
    """Writes a checkpoint into a new folder in one of `FORMATS`, and opens it there.

    One tensor or file is in memory at a time. `dtype` is "float32" or "bfloat16", by default the
    one that loses nothing. A `vocabulary` file replaces the source's; T5's 100 sentinels follow its
    pieces if the embedding has enough rows. T5X's format holds no vocabulary. If `tokens` are
    given, the copy is a draft that guesses only these, see `narrowed`.

    Raises ValueError if a format is unknown, the source cannot be read, the destination exists, or
    the vocabulary has more pieces than the embedding; OSError if, for example, the disk is full.
    """
    kinds = get_args(native.Storage) if to == "native" else tuple(DTYPES)
    for name, value, known in (("format", to, FORMATS), ("dtype", dtype or kinds[0], kinds)):
        if value not in known:
            raise ValueError(f"Unknown {name} {value!r} to write; known: {', '.join(known)}.")
    if vocabulary is not None and to == "t5x":
        raise ValueError(
            f"T5X's format holds no vocabulary, so {vocabulary} would be lost; leave it out, and "
            "give it (--vocabulary) where the checkpoint is used."
        )
    vacant(destination)
    checkpoint = open(source)
    if vocabulary is not None:
        rows = checkpoint.config.vocab_size
        pieces = from_elsewhere(vocabulary, rows)
        pieces.require_room(rows, str(source))
        fields = {"vocabulary": pieces.path, "extra_ids": pieces.extra_ids}
        checkpoint = dataclasses.replace(checkpoint, **fields)
    if tokens is not None:
        checkpoint = narrowed(checkpoint, tokens)
    config = checkpoint.config
    if to != "native" and (config.reads.draft_vocabulary or config.reads.target_layers):
        raise ValueError(
            f"{source} is a draft that reads its target's decoder, or guesses only some tokens; "
            f"the format {to} knows no such model (--to native)."
        )
    FORMATS[to].write(destination, checkpoint, dtype)
    return FORMATS[to].open(destination)


def _located(name: str) -> str:
    """The folder of a checkpoint, downloaded if it is on the Hugging Face hub."""
    if not known(name):
        raise ValueError(
            removed.said(name)
            or f"There is no checkpoint {name!r}: it is neither a folder, nor one of "
            f"{', '.join(SHIPPED)}, nor a Hugging Face id like google/t5-v1_1-small."
        )
    if name in SHIPPED or name.startswith("gs://") or os.path.isdir(name):
        return str(SHIPPED.get(name, name))
    from huggingface_hub import errors, snapshot_download

    patterns = ["*.json", "*.safetensors", SPIECE, TOKENIZER_MODEL, MERGES, TEMPLATE]
    try:
        folder = snapshot_download(name, allow_patterns=patterns)
        if not list(pathlib.Path(folder).glob("*.safetensors")):  # Older uploads.
            patterns.append("pytorch_model*.bin")
            folder = snapshot_download(name, allow_patterns=patterns)
        return folder
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"There is no folder {name}, and the hub did not give the model of that name "
            f"({reason})."
        ) from error
