"""Checkpoints of three formats, opened alike and turned into any: ours, T5X's, Hugging Face's."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from types import ModuleType

from speculative.checkpoints import huggingface, native, t5x
from speculative.checkpoints.checkpoint import Checkpoint
from speculative.models import SIZES, Config, DecoderOnlyConfig
from speculative.vocabulary import from_elsewhere, open_vocabulary

ASSETS = pathlib.Path(__file__).parent.parent / "assets"
SHIPPED = {
    "debian_target": ASSETS / "target",
    "debian_draft": ASSETS / "draft",
    "debian_draft_smaller": ASSETS / "draft_smaller",
    "debian_lm": ASSETS / "lm",
    "debian_lm_draft": ASSETS / "lm_draft",
    "debian_lm_draft_smaller": ASSETS / "lm_draft_smaller",
}
"""What ships with the package, by name: a target and a language model, each with its drafts."""

FORMATS: Mapping[str, ModuleType] = {"native": native, "t5x": t5x, "huggingface": huggingface}

__all__ = [
    "ASSETS",
    "FORMATS",
    "SHIPPED",
    "Checkpoint",
    "convert",
    "describe",
    "known",
    "native",
    "open",
]


def open(name: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint without reading its tensors.

    Args:
        name: a folder of any format, ``gs://bucket/folder`` for T5X's, the name of a shipped
            model, or a Hugging Face id (``google/t5-v1_1-small``), whose files come from the
            hub or from its cache on this machine.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged; the message says where.
    """
    place = _located(str(name))
    try:
        for kind in FORMATS.values():
            if kind.found(place):
                return kind.open(place)
    except PermissionError as error:
        raise ValueError(f"{error.filename} cannot be read: permission denied.") from error
    files = sorted(path.name for path in pathlib.Path(place).iterdir())[:5]
    raise ValueError(
        f"{place} is no checkpoint: it has neither a config.json of ours or of Hugging Face, nor "
        f"T5X's index '{t5x.INDEX}'; it holds {', '.join(files) or 'nothing'}."
    )


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """What there is to know of a checkpoint without reading its tensors, for people."""
    config, place = checkpoint.config, pathlib.Path(checkpoint.place)
    named = [name for name, sizes in SIZES.items() if sizes == config.replace(dtype=sizes.dtype)]
    kinds = collections.Counter(tensor.dtype for tensor in checkpoint.tensors.values())
    vocabulary = "none beside the weights"
    if checkpoint.vocabulary is not None:
        pieces = open_vocabulary(checkpoint.vocabulary, checkpoint.extra_ids)
        vocabulary = f"{checkpoint.vocabulary.name}, {pieces.size - pieces.extra_ids:,} pieces"
        vocabulary += f" and {pieces.extra_ids} sentinels" if pieces.extra_ids else ""
    family, layers = _kind(config)
    checksums = hashlib.sha256()
    if place.is_dir():
        for path in sorted(path for path in place.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                checksums.update(hashlib.file_digest(file, "sha256").digest())
    return {
        "checkpoint": checkpoint.place,
        "format": checkpoint.format,
        "family": family + (f", the sizes of {named[0]}" if named else ""),
        "layers": layers,
        "sizes": f"{config.emb_dim} features, {config.num_heads} heads of {config.head_dim}, "
        f"feed-forward {config.mlp_dim:,}, {config.vocab_size:,} embeddings",
        "parameters": f"{checkpoint.parameters:,}",
        "stored as": ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.items()),
        "vocabulary": vocabulary,
        "sha256": checksums.hexdigest() if place.is_dir() else "not of a remote folder",
    }


def _kind(config: Config) -> tuple[str, str]:
    """The family of a model and its layers, for people."""
    tied = "tied" if config.logits_via_embedding else "untied"
    gated = len(config.mlp_activations) == 2
    if isinstance(config, DecoderOnlyConfig):
        layers = f"{config.num_layers} decoder layer{'s' * (config.num_layers != 1)}"
        if config.gpt:
            return f"GPT ({tied} logits)", f"{layers}, {config.max_positions:,} positions"
        said = "gated " * gated + config.mlp_activations[0].upper()
        return f"LaMDA-like ({said}, {tied} logits)", f"{layers}, relative positions"
    encoder, decoder = (
        f"{count} {kind} layer{'s' * (count != 1)}"
        for kind, count in (
            ("encoder", config.num_encoder_layers),
            ("decoder", config.num_decoder_layers),
        )
    )
    if config.source_dim:
        encoder = f"reads its target's encoder of {config.source_dim} features"
    version = "v1.1 (gated GELU" if gated else "v1.0 (ReLU"
    return f"T5 {version}, {tied} logits)", f"{encoder}, {decoder}"


def known(name: str) -> bool:
    """Whether a name may be a checkpoint's, as `open` takes them."""
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    there = pathlib.Path(name).is_dir()
    return name in SHIPPED or there or name.startswith("gs://") or hub


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    dtype: str | None = None,
    vocabulary: str | os.PathLike[str] | None = None,
    extra_ids: int | None = None,
) -> Checkpoint:
    """Writes a checkpoint in another format, one tensor or file in memory at a time.

    Args:
        source: as `open`.
        destination: a folder that does not exist yet.
        to: a name of `FORMATS`.
        dtype: "float32" or "bfloat16"; by default what loses nothing.
        vocabulary: a file to store with the weights in place of the source's vocabulary; T5X's
            checkpoints come without one, and T5X's format has no room for it.
        extra_ids: sentinels after that vocabulary's pieces; by default T5's 100 where there is
            room.

    Returns:
        The new checkpoint, opened.

    Raises:
        ValueError: as `open`, or the destination exists or cannot be written.
    """
    checkpoint = open(source)
    if vocabulary is not None:
        pieces = from_elsewhere(pathlib.Path(vocabulary), checkpoint.config.vocab_size)
        checkpoint = dataclasses.replace(
            checkpoint,
            vocabulary=pieces.path,
            extra_ids=pieces.extra_ids if extra_ids is None else extra_ids,
        )
    FORMATS[to].write(destination, checkpoint, dtype)
    return FORMATS[to].open(destination)


def _located(name: str) -> str:
    """The folder of a checkpoint, fetched where it is one of the hub's."""
    if not known(name):
        raise ValueError(
            f"There is no checkpoint {name!r}: it is neither a folder, nor one of "
            f"{', '.join(SHIPPED)}, nor a Hugging Face id like google/t5-v1_1-small."
        )
    if name in SHIPPED:
        return str(SHIPPED[name])
    if name.startswith("gs://") or pathlib.Path(name).is_dir():
        return name
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
        from huggingface_hub import errors  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(
            f"There is no folder {name}; to fetch the Hugging Face model of that name, install "
            "huggingface_hub: pip install huggingface_hub."
        ) from error
    patterns = ["*.json", "*.safetensors", *huggingface.VOCABULARIES]
    try:
        place = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
        if not list(pathlib.Path(place).glob("*.safetensors")):  # Older uploads.
            patterns.append("pytorch_model*.bin")
            place = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
        return place
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"There is no folder {name}, and the hub did not give the model of that name ({said})."
        ) from error
