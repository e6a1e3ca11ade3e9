"""A tiny random pair as checkpoints with the shipped vocabulary, padded to different sizes."""

import functools
import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from speculative.checkpoints import ASSETS, native
from speculative.models import Config, DecoderOnlyConfig, FlaxModel, T5Config, abstract_params
from speculative.types import Logits, PyTree

VOCABULARY = ASSETS / "debian.model"
TARGET = T5Config(8192, 16, 2, 8, 24, 1, 1)
DRAFT = T5Config(8200, 8, 1, 8, 16, 1, 1)
GPT = DecoderOnlyConfig(8192, 16, 2, 8, 24, 2, max_positions=96)
GPT_DRAFT = DecoderOnlyConfig(8200, 8, 1, 8, 16, 1, max_positions=80)
FEW = 1024


def random(config: Config, seed: int) -> PyTree:
    """Parameters as a model's `init` makes them, but for the numbers: that takes a second."""
    draws = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        kind = path[-1].key
        if kind in ("scale", "bias"):
            return np.full(leaf.shape, kind == "scale", np.float32)
        std = 1.0 if "embedding" in kind else leaf.shape[0] ** -0.5
        return draws.normal(0, std, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(value, abstract_params(config))


def drawn(config: Config, seed: int, scale: float = 1.0) -> PyTree:
    """Parameters that are all random, norms and biases too."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: draws.normal(0.0, scale, x.shape).astype(np.float32), abstract_params(config)
    )


@functools.partial(jax.jit, static_argnums=0)
def forward(model: FlaxModel, params: PyTree, *given: Any, **more: Any) -> Logits:
    """Teacher-forced logits [B, L, V]."""
    return model.forward_with_hidden(params, *given, **more)[0]


def save(
    folder: pathlib.Path,
    config: Config,
    seed: int,
    logits_scale: float = 1.0,
    vocabulary: pathlib.Path = VOCABULARY,
) -> None:
    params = random(config, seed)
    if "logits_dense" in params["decoder"]:
        params["decoder"]["logits_dense"]["kernel"] *= logits_scale
    native.save(folder, config, params, vocabulary)


def save_pair_of_few_pieces(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A target and a draft as above, with the `FEW` most frequent pieces of the vocabulary.

    They are for what scores texts or trains, which takes as long as there are logits.
    """
    pieces = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    pieces.ParseFromString(VOCABULARY.read_bytes())
    del pieces.pieces[FEW:]
    vocabulary = folder / "few.model"
    vocabulary.write_bytes(pieces.SerializeToString())
    save(folder / "target", TARGET.replace(vocab_size=FEW), 0, vocabulary=vocabulary)
    save(folder / "draft", DRAFT.replace(vocab_size=FEW + 8), 1, vocabulary=vocabulary)
    return folder / "target", folder / "draft"


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed from now on, in a list that grows."""
    names: list[str] = []
    digest = hashlib.file_digest

    def noting(file, kind):
        names.append(pathlib.Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noting)
    return names
