"""Hugging Face folders of `T5ForConditionalGeneration`: v1.0, v1.1 and Flan.

A `config.json` and weights as safetensors, in one file or in shards with an index, or as
`pytorch_model.bin`, for which torch must be installed. The transformers package is not needed.
"""

import contextlib
import json
import pathlib
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from speculative.checkpoints.checkpoint import (
    CONFIG,
    DTYPES,
    Checkpoint,
    Tensor,
    read_settings,
    written,
)
from speculative.checkpoints.native import read_safetensors
from speculative.models import T5Config
from speculative.vocabulary import EXTRA_IDS

VOCABULARY = "spiece.model"
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
SHARD_BYTES = 2**30
"""The largest file that is written."""

ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": (
        "pre_self_attention_layer_norm",
        "pre_cross_attention_layer_norm",
        "pre_mlp_layer_norm",
    ),
}
ATTENTIONS = {
    "encoder": {"SelfAttention": "attention"},
    "decoder": {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"},
}

ALIASES = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
"""Copies of the embedding, and a table that early exports held and no model reads."""


def names(config: T5Config) -> dict[str, tuple[str, bool]]:
    """Hugging Face's name of each tensor of ours, and whether it is stored transposed."""
    table = {"token_embedder/embedding": ("shared.weight", False)}
    if not config.logits_via_embedding:
        table["decoder/logits_dense/kernel"] = ("lm_head.weight", True)
    inputs = ("wi",) if len(config.mlp_activations) == 1 else ("wi_0", "wi_1")
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        table[f"{stack}/{stack}_norm/scale"] = (f"{stack}.final_layer_norm.weight", False)
        table[f"{stack}/relpos_bias/rel_embedding"] = (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            True,
        )
        for i in range(depth):
            ours, theirs = f"{stack}/layers_{i}", f"{stack}.block.{i}.layer"
            for j, norm in enumerate(NORMS[stack]):
                table[f"{ours}/{norm}/scale"] = (f"{theirs}.{j}.layer_norm.weight", False)
            for j, (their_part, part) in enumerate(ATTENTIONS[stack].items()):
                for letter, projection in ATTENTION.items():
                    table[f"{ours}/{part}/{projection}/kernel"] = (
                        f"{theirs}.{j}.{their_part}.{letter}.weight",
                        True,
                    )
            last = f"{theirs}.{len(ATTENTIONS[stack])}.DenseReluDense"
            for kernel in (*inputs, "wo"):
                table[f"{ours}/mlp/{kernel}/kernel"] = (f"{last}.{kernel}.weight", True)
    return table


def found(folder: str | pathlib.Path) -> bool:
    """Whether a folder is Hugging Face's: its configuration tells a type of model."""
    return "model_type" in read_settings(folder)


def open(folder: str | pathlib.Path) -> Checkpoint:
    """Opens a folder.

    Raises:
        ValueError: it holds another kind of model, a setting of T5 that is not supported, or
            no weights; or a tensor is missing, unknown or of the wrong shape.
    """
    folder = pathlib.Path(folder)
    config = configuration(read_settings(folder), folder / CONFIG)
    stored = _stored(folder)
    table = names(config)
    known = {theirs: (ours, turned) for ours, (theirs, turned) in table.items()}
    tensors = {}
    for name, tensor in stored.items():
        if ALIASES.fullmatch(name) or (name == "lm_head.weight" and name not in known):
            continue
        ours, turned = known.get(name, (name, False))
        tensors[ours] = _transposed(tensor) if turned else tensor
    if (
        not config.logits_via_embedding
        and "lm_head.weight" not in stored
        and "shared.weight" in stored
    ):
        # Tied but not scaled: a copy of the embedding is the same.
        tensors["decoder/logits_dense/kernel"] = _transposed(stored["shared.weight"])
    missing = [theirs for ours, (theirs, _) in table.items() if ours not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks the tensor {missing[0]}.")
    vocabulary = folder / VOCABULARY
    return Checkpoint(
        str(folder),
        "huggingface",
        config,
        tensors,
        vocabulary if vocabulary.is_file() else None,
        _extra_ids(folder),
    )


def configuration(settings: Mapping[str, Any], place: str | pathlib.Path) -> T5Config:
    """The sizes that a `config.json` tells.

    Raises:
        ValueError: it is no T5's, or of a T5 that is not supported.
    """
    kind = settings.get("model_type")
    if kind not in ("t5", "mt5"):
        raise ValueError(
            f"{place} is of a {kind!r} model; only T5 encoder-decoders (t5, mt5) are read."
        )
    usual, tied = ("relu", True) if kind == "t5" else ("gated-gelu", False)
    activation = settings.get("feed_forward_proj", usual)
    activations = {"relu": ("relu",), "gated-gelu": ("gelu", "linear")}
    if activation not in activations:
        raise ValueError(
            f"{place} has the feed_forward_proj {activation!r}; known are {', '.join(activations)}."
        )
    if settings.get("layer_norm_epsilon", 1e-6) != 1e-6:
        raise ValueError(
            f"{place} has a layer_norm_epsilon of {settings['layer_norm_epsilon']}; T5's is 1e-6."
        )
    try:
        return T5Config(
            vocab_size=settings["vocab_size"],
            emb_dim=settings["d_model"],
            num_heads=settings["num_heads"],
            head_dim=settings["d_kv"],
            mlp_dim=settings["d_ff"],
            num_encoder_layers=settings["num_layers"],
            num_decoder_layers=settings.get("num_decoder_layers") or settings["num_layers"],
            mlp_activations=activations[activation],
            # Recent versions say "tied" of every T5, and tell by another name which are scaled.
            logits_via_embedding=settings.get(
                "scale_decoder_outputs", settings.get("tie_word_embeddings", tied)
            ),
            num_buckets=settings.get("relative_attention_num_buckets", 32),
            max_distance=settings.get("relative_attention_max_distance", 128),
        )
    except KeyError as error:
        raise ValueError(f"{place} lacks {error}.") from error


def write(folder: str | pathlib.Path, checkpoint: Checkpoint, dtype: str | None = None) -> None:
    """Writes a folder that transformers loads, whole or not at all.

    Args:
        folder: must not exist yet.
        checkpoint: what to write.
        dtype: "float32" or "bfloat16"; by default what loses nothing.
    """
    config, kind = checkpoint.config, dtype or checkpoint.dtype
    if config.source_dim:
        raise ValueError(f"transformers knows no T5 without an encoder, as {checkpoint.place} is.")
    table = names(config)
    size = DTYPES[kind].itemsize
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for ours, tensor in checkpoint.tensors.items():
        needed = size * int(np.prod(tensor.shape))
        if shards[-1] and needed > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(ours)
        room -= needed
    with written(folder) as unfinished:
        index = {}
        for number, members in enumerate(shards, 1):
            many = f"model-{number:05}-of-{len(shards):05}.safetensors"
            file = SAFETENSORS if len(shards) == 1 else many
            values = {}
            for ours in members:
                theirs, turned = table[ours]
                value = checkpoint.read(ours).astype(DTYPES[kind])
                values[theirs] = np.ascontiguousarray(value.T if turned else value)
                index[theirs] = file
            save_file(values, unfinished / file, metadata={"format": "pt"})
            (unfinished / file).chmod(0o644)  # safetensors makes them readable to the owner alone.
        if len(shards) > 1:
            total = sum(size * int(np.prod(t.shape)) for t in checkpoint.tensors.values())
            contents = {"metadata": {"total_size": total}, "weight_map": index}
            _write_json(unfinished / f"{SAFETENSORS}.index.json", contents)
        _write_json(unfinished / CONFIG, _settings(config, kind))
        if checkpoint.vocabulary is not None:
            shutil.copy(checkpoint.vocabulary, unfinished / VOCABULARY)
            tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": checkpoint.extra_ids}
            _write_json(unfinished / "tokenizer_config.json", tokenizer)


def _settings(config: T5Config, dtype: str) -> dict[str, Any]:
    gated = len(config.mlp_activations) == 2
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.emb_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": config.logits_via_embedding,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "torch_dtype": dtype,
    }


def _write_json(path: pathlib.Path, contents: Any) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")


def _transposed(tensor: Tensor) -> Tensor:
    return Tensor(tensor.shape[::-1], tensor.dtype, lambda: tensor.read().T)


def _extra_ids(folder: pathlib.Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        return int(tokenizer.get("extra_ids", EXTRA_IDS))
    return EXTRA_IDS


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
