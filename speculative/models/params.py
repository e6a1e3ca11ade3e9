"""The model of a configuration, the shapes of its parameters, and random ones."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from speculative.models.config import Config, T5Config
from speculative.models.decoder_only import DecoderOnly
from speculative.models.model import FlaxModel
from speculative.models.t5 import T5
from speculative.types import PyTree


def model_of(config: Config) -> FlaxModel:
    """The model of a configuration's kind."""
    return T5(config) if isinstance(config, T5Config) else DecoderOnly(config)


@functools.cache
def abstract_params(config: Config) -> PyTree:
    """Shapes of a configuration's parameters, with nothing allocated."""
    return jax.eval_shape(model_of(config).init, jax.random.key(0))


def random_params(config: Config, seed: int = 0) -> PyTree:
    """Random parameters in the configuration's dtype, a tensor at a time, as large as they come.

    They keep activations about 1, as trained ones do; a model's `init` is for training.
    """
    leaves, tree = jax.tree.flatten(abstract_params(config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [_random(key, leaf.shape, config.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5


def read_by_step(params: PyTree) -> list[Array]:
    """The parameters, packed or not, of which every decoding step reads all.

    Left out are the encoder, the kernels that met the source once, and tables of which a step
    reads a row a token.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = [([_part(key) for key in path], leaf) for path, leaf in leaves]
    separate = any({"logits_dense", "logits"} & set(path) for path, _ in named)
    return [leaf for path, leaf in named if _met(path, tied=not separate)]


def _met(path: list[str], tied: bool) -> bool:
    if "encoder" in path or "position_embedder" in path:
        return False
    if "token_embedder" in path:
        return tied
    crosses = "encoder_decoder_attention" in path
    return not (crosses and {"key", "value"} & set(path))


def _part(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", "")))
