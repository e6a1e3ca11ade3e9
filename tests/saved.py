"""A tiny random pair as checkpoints with the shipped vocabulary, padded to different sizes."""

import hashlib
import pathlib

import jax
import numpy as np
import pytest

from speculative.checkpoints import ASSETS, native
from speculative.models import Config, DecoderOnlyConfig, T5Config, model_of

VOCABULARY = ASSETS / "debian.model"
TARGET = T5Config(8192, 16, 2, 8, 24, 1, 1)
DRAFT = T5Config(8200, 8, 1, 8, 16, 1, 1)
GPT = DecoderOnlyConfig(8192, 16, 2, 8, 24, 2, max_positions=96)
GPT_DRAFT = DecoderOnlyConfig(8200, 8, 1, 8, 16, 1, max_positions=80)


def save(folder: pathlib.Path, config: Config, seed: int, logits_scale: float = 1.0) -> None:
    params = jax.tree.map(np.array, model_of(config).init(jax.random.key(seed)))
    if "logits_dense" in params["decoder"]:
        params["decoder"]["logits_dense"]["kernel"] *= logits_scale
    native.save(folder, config, params, VOCABULARY)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed from now on, in a list that grows."""
    names: list[str] = []
    digest = hashlib.file_digest

    def noting(file, kind):
        names.append(pathlib.Path(file.name).name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noting)
    return names
