"""The families of models, and look-ups by configuration or by name."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from speculative.backends import Weight, quantized
from speculative.models import gemma, gpt, llama, t5, t5gemma, t5gemma2
from speculative.models.config import AXES, Config
from speculative.models.decoder_only import DecoderOnly
from speculative.models.encoder_decoder import Seq2Seq
from speculative.models.flax_model import FlaxModel
from speculative.models.gemma import GemmaConfig, GemmaNames
from speculative.models.gpt import DecoderOnlyConfig, GPTNames
from speculative.models.llama import LlamaConfig, LlamaNames
from speculative.models.names import AnyNames
from speculative.models.t5 import T5, T5Config, T5Names
from speculative.models.t5gemma import T5GemmaConfig, T5GemmaNames
from speculative.models.t5gemma2 import T5Gemma2Config, T5Gemma2Names
from speculative.types import PAD_ID, PyTree


class Family(NamedTuple):
    """The parts of a family of models; `sizes` are its named configurations."""

    config: type[Config]
    model: type[FlaxModel]
    names: AnyNames
    sizes: Mapping[str, Config]


# Keyed by the name of the format in which this program stores their models.
FAMILIES = {
    "speculative-t5": Family(T5Config, T5, T5Names(), t5.SIZES),
    "speculative-decoder-only": Family(DecoderOnlyConfig, DecoderOnly, GPTNames(), gpt.SIZES),
    "speculative-gemma": Family(GemmaConfig, DecoderOnly, GemmaNames(), gemma.SIZES),
    "speculative-t5gemma": Family(T5GemmaConfig, Seq2Seq, T5GemmaNames(), t5gemma.SIZES),
    "speculative-t5gemma2": Family(T5Gemma2Config, Seq2Seq, T5Gemma2Names(), t5gemma2.SIZES),
    "speculative-llama": Family(LlamaConfig, DecoderOnly, LlamaNames(), llama.SIZES),
}
SIZES = {name: size for family in FAMILIES.values() for name, size in family.sizes.items()}


def named(size: str, **changes: object) -> Config:
    """The configuration of a public size, e.g. ``named("t5_1_1_xxl", dtype="bfloat16")``."""
    if size not in SIZES:
        raise ValueError(f"Unknown model size {size!r}; known: {', '.join(SIZES)}.")
    return SIZES[size].replace(**changes)


def format_of(config: Config) -> str:
    """The name in `FAMILIES` of a configuration's family."""
    for name, family in FAMILIES.items():
        if type(config) is family.config:
            return name
    raise ValueError(f"{type(config).__name__} is of no family; give it an entry in FAMILIES.")


def names_of(config: Config) -> AnyNames:
    """Other programs' names for the tensors of a configuration's model."""
    return FAMILIES[format_of(config)].names


def model_of(config: Config, start_id: int = PAD_ID) -> FlaxModel:
    """The model of a configuration; `start_id` is the token before its texts."""
    return FAMILIES[format_of(config)].model(config, start_id)


@functools.cache
def abstract_params(config: Config) -> PyTree:
    """Shapes of a configuration's parameters, without allocating any.

    The layers of a stack are alike, so one is traced for all: hundreds would take seconds.
    """
    one = config.replace(**{field: min(getattr(config, field), 1) for field in config.depths})
    params = jax.eval_shape(model_of(one).init, jax.random.key(0))
    for stack, depth in ("decoder", config.decoder_layers), ("encoder", config.encoder_layers):
        for layer in range(1, depth):
            params[stack][f"layers_{layer}"] = params[stack]["layers_0"]
    return params


def random_params(config: Config, placed: PyTree = None) -> PyTree:
    """Random parameters in the configuration's dtype, made one whole tensor at a time.

    Those of `Config.in_int8` are `Weight`. `placed`, from `sharding.placed`, lays them out on
    several devices, each of which makes its own part.
    They keep activations about 1, as trained ones do; a model's `init` is for training.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    keys, made = jax.random.split(jax.random.key(0), len(leaves)), []
    where = [None] * len(leaves) if placed is None else tree.flatten_up_to(placed)
    for key, (path, leaf), on in zip(keys, leaves, where, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axis = AXES[name.rpartition("/")[2]] if config.in_int8(name) else None
        there = jax.tree.map(lambda one: one.sharding, on)
        random = jax.jit(_random, static_argnums=(1, 2, 3), out_shardings=there)
        made.append(random(key, leaf.shape, config.dtype, axis))
    return jax.tree.unflatten(tree, made)


def _random(key: Array, shape: tuple[int, ...], dtype: str, axis: int | None) -> Array | Weight:
    """A random tensor, quantized if the axis of its inputs is given."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    made = jax.random.normal(key, shape, dtype) * shape[0] ** -0.5
    return made if axis is None else quantized(made, axis)


def read_by_step(params: PyTree) -> list[Array]:
    """The parameters, prepacked or not, that every decoding step reads in full.

    The encoder and projections of the source are read once per text, embeddings a row per token.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    named = [(set(name(path).split("/")), leaf) for path, leaf in leaves]
    untied = any(path & {"logits_dense", "logits"} for path, _ in named)
    unread = {"encoder", "position_embedder", *(["token_embedder"] if untied else [])}
    cross, source = "encoder_decoder_attention", {"key", "value"}
    own = {"decoder", "token_embedder"}  # The decoder's own embedding is never tied.
    return [
        leaf
        for path, leaf in named
        if not (path & unread or path >= own or cross in path and path & source)
    ]
