"""Computes the device memory that a row needs, from shapes only, and checks that it fits."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speculative.backends.xla import QUERIES
from speculative.checkpoints.checkpoint import by_name
from speculative.decoding import Decoding
from speculative.measurement.chips import device_bytes
from speculative.models import Config, abstract_params, model_of, sharding
from speculative.models.decoder_only import AT_ONCE, cache_room
from speculative.rows.config import RowConfig

MAPS = pathlib.Path("/proc/self/maps")  # One line per memory map of this process.
MOST_MAPS = pathlib.Path("/proc/sys/vm/max_map_count")


class Need(NamedTuple):
    """The memory that models need at batch size 1, in bytes."""

    weights: int
    copies: int  # On a CPU, kernels in another layout, in float32, next to the checkpoint's.
    caches: int  # Keys and values, of self- and cross-attention.
    activations: int  # The peak, of a source or of a verify pass and its logits.


def need(
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    source_length: int = 512,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> Need:
    """The memory for a target and perhaps a draft, with `gamma` guesses per step (None is 7).

    Where devices share the models, in `shards` parts each, this is the need of one device; a CPU's
    devices share one memory, so there it is the need of them all.
    """
    gamma = gamma or (min(7, tree) if tree else 7)
    of_each, cpu = [], jax.default_backend() == "cpu"
    for number, model in enumerate(models):
        parts = 1 if cpu else shards[number] if number < len(shards) else 1
        weights, copies = _weights(model, cpu, parts)
        config = Decoding(model.vocab_size, gamma=gamma, max_length=max_length, tree=tree)
        size, width = jnp.dtype(model.dtype).itemsize, config.guesses + 1
        read, text = source_length, config.cache_lengths()[-1]
        # The text's and the source's; a prompt lies in the text's caches.
        positions = [text + source_length] * model.decoder_layers
        if model_of(model).decoder_only:
            read = min(read, AT_ONCE)  # Tokens read at once.
            positions = [
                cache_room(model, i, source_length, text) for i in range(model.decoder_layers)
            ]
        head = model.num_heads * model.head_dim
        source = read * (2 * model.mlp_dim + 4 * model.emb_dim) * size
        source += model.num_heads * min(read, QUERIES) * source_length * 4
        # The target's logits and probabilities are float32, and so are those of every guess.
        verify = 4 * width * model.vocab_size * 4 + width * (2 * model.mlp_dim + 4 * head) * size
        kept = model.kv_heads * model.head_dim  # The size of a key or value.
        caches = 2 * kept * sum(positions) * size
        of_each.append((weights, copies, caches // parts, max(source, verify)))
    return Need(*map(sum, zip(*of_each, strict=True)))


def _weights(model: Config, cpu: bool, parts: int) -> tuple[int, int]:
    """The bytes of a model's parameters, and of the panels into which a CPU packs its kernels.

    Both are per device if devices share the model in `parts` parts.
    """
    weights = copies = 0
    for name, leaf in by_name(abstract_params(model)).items():
        in_int8 = model.in_int8(name)
        size = leaf.size * (1 if in_int8 else jnp.dtype(model.dtype).itemsize)
        weights += size // parts if sharding.shared(name, leaf.shape, parts) else size
        if parts > 1 and name == "token_embedder/embedding" and model.logits_via_embedding:
            weights += size // parts  # The kernel of the logits.
        copies += leaf.size * (1 if in_int8 else 4) * cpu
    return weights, copies


def spare_maps() -> None:
    """Forgets compiled programs once this process uses half of the memory maps that it may have.

    On a CPU every program takes some, and when none is left the compiler ends the process. Only
    Linux has such a limit.
    """
    with contextlib.suppress(OSError):
        if 2 * MAPS.read_bytes().count(b"\n") > int(MOST_MAPS.read_text()):
            jax.clear_caches()


def batch(
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    most: int,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> int:
    """The number of rows, up to `most`, that fit the present device's memory with the weights."""
    needed = need(models, gamma, max_length, tree=tree, shards=shards)
    free = device_bytes()[1] - needed.weights
    return max(1, min(most, int(0.5 * free) // (needed.caches + needed.activations)))


def require_batch(
    names: tuple[str, str],
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    size: int,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> None:
    """Raises ValueError unless a batch of `size` rows of a pair fits the present device."""
    most = batch(models, gamma, max_length, size, tree, shards)
    if most < size:
        raise ValueError(
            f"{size} rows of {names[0]} with {names[1]} do not fit the memory of "
            f"{device_bytes()[0]}; the largest batch that does has {most}."
        )


def require(
    config: RowConfig, models: Sequence[Config], source_length: int = 512, size: int = 1
) -> None:
    """Raises ValueError unless a row's models, and a batch of `size` texts, fit the device."""
    pair = (config.target, config.draft), models, config.gamma, config.max_length
    require_text(*pair, source_length, config.tree, config.shards)
    require_batch(*pair, size, config.tree, config.shards)


def require_text(
    names: tuple[str, str],
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    source_length: int,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> None:
    """Raises ValueError unless a pair and a text of `source_length` tokens fit the device."""
    needed = need(models, gamma, max_length, source_length, tree, shards)
    name, there = device_bytes()
    if sum(needed) > there:
        parts = needed._asdict().items()
        made_of = ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts if size)
        raise ValueError(
            f"{names[0]} with {names[1]} needs {sum(needed) / 2**30:.1f} GiB for texts of "
            f"{source_length:,} tokens, but {name} has {there / 2**30:.1f} GiB ({made_of}): take a "
            "narrower dtype, int8 (--quantize=int8), smaller models, shorter texts and outputs, "
            "several devices (--mesh) or another one."
        )
