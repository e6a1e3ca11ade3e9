"""A random T5 pair that fits in a few kilobytes, with vocabularies padded to different sizes."""

import functools
from typing import Any

import jax
import numpy as np

from speculative.backends import prepack
from speculative.models import T5, T5Config
from speculative.models.reads import Reads
from speculative.types import PADDING, ROUNDED, PyTree
from tests import saved

VOCABULARY = 50
"""Pieces; the models have more rows than that, as likely as any other."""

TARGET = T5(T5Config(64, 16, 2, 8, 32, 1, 1))
DRAFT = T5(T5Config(56, 8, 1, 8, 16, 1, 1))
READER = T5(T5Config(56, 8, 1, 8, 16, 0, 1, reads=Reads(16)))
"""A draft that reads the target's encoder."""
HIDDEN = T5(READER.config.replace(reads=Reads(16, ("decoder/layers_0", "decoder/decoder_norm"))))
"""A draft that reads hidden states of the target's decoder too."""


@functools.cache
def stored_params() -> PyTree:
    """The target's parameters as a checkpoint stores them."""
    return saved.random(TARGET.config, 0)


@functools.cache
def target_params() -> PyTree:
    return prepack(stored_params())


@functools.cache
def draft_params() -> PyTree:
    return prepack(saved.random(DRAFT.config, 1), ROUNDED)


@functools.cache
def reader_params() -> PyTree:
    return prepack(saved.random(READER.config, 2))


@functools.cache
def hidden_params() -> PyTree:
    """With embeddings small enough that the hidden states matter."""
    params = saved.random(HIDDEN.config, 3)
    params["token_embedder"]["embedding"] *= 0.3
    return prepack(params)


@functools.cache
def near_params() -> PyTree:
    """The target's own parameters, a little off: a draft that is often right."""
    return near(target_params())


def near(params: PyTree) -> PyTree:
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x * (1 + rng.normal(0.0, 0.15, x.shape)), params)


def in_dtype(model: T5, dtype: str) -> T5:
    return T5(model.config.replace(dtype=dtype))


def rounded(params: PyTree, dtype: str) -> PyTree:
    """Stored parameters in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def shuffled(params: PyTree) -> PyTree:
    """Stored parameters of the same model, which adds the features of its MLPs in another order."""

    def of_layer(path: tuple[Any, ...], x: Any) -> Any:
        names = [part.key for part in path]
        if "mlp" not in names:
            return x
        axis = 0 if "wo" in names else 1
        return x.take(np.random.default_rng(0).permutation(x.shape[axis]), axis=axis)

    return jax.tree_util.tree_map_with_path(of_layer, params)


def sources(rows: int) -> np.ndarray:
    """Rows [rows, 9] of different lengths."""
    inputs = np.random.default_rng(3).integers(2, VOCABULARY, (rows, 9)).astype(np.int32)
    for row in range(rows):
        inputs[row, 4 + row % 6 :] = PADDING
    return inputs
