"""What a row needs of a device's memory, from shapes alone, and whether the device has it."""

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
from speculative.models.decoder_only import AT_ONCE
from speculative.rows.config import RowConfig

MAPS = pathlib.Path("/proc/self/maps")  # A line for each map of this process's memory.
MOST_MAPS = pathlib.Path("/proc/sys/vm/max_map_count")


class Need(NamedTuple):
    """What models need at batch size 1, in bytes."""

    weights: int
    copies: int  # On a CPU, kernels in another layout, in float32, beside those of the checkpoint.
    caches: int  # Keys and values, of self- and cross-attention.
    activations: int  # The most alive at once, of a source or of a verify pass and its logits.


def need(
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    source_length: int = 512,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> Need:
    """What models need together, a target and perhaps a draft, for so many guesses (None is 7).

    Of models that devices share in so many parts each, it is what one device needs; but a CPU's
    devices share its memory.
    """
    gamma = gamma or (min(7, tree) if tree else 7)
    of_each, cpu = [], jax.default_backend() == "cpu"
    for number, model in enumerate(models):
        parts = 1 if cpu else shards[number] if number < len(shards) else 1
        weights, copies = _weights(model, cpu, parts)
        config = Decoding(model.vocab_size, gamma=gamma, max_length=max_length, tree=tree)
        size, width = jnp.dtype(model.dtype).itemsize, config.guesses + 1
        read = source_length  # Tokens at once.
        if model_of(model).decoder_only:
            read = min(read, AT_ONCE)
        # Of the text and of the source, which is in the same caches where it is a prompt.
        positions = config.cache_lengths()[-1] + source_length
        head = model.num_heads * model.head_dim
        source = read * (2 * model.mlp_dim + 4 * model.emb_dim) * size
        source += model.num_heads * min(read, QUERIES) * source_length * 4
        # Logits and probabilities are float32, the target's and those of every guess.
        verify = 4 * width * model.vocab_size * 4 + width * (2 * model.mlp_dim + 4 * head) * size
        kept = model.kv_heads * model.head_dim  # Of a key or value.
        caches = 2 * model.decoder_layers * kept * positions * size
        of_each.append((weights, copies, caches // parts, max(source, verify)))
    return Need(*map(sum, zip(*of_each, strict=True)))


def _weights(model: Config, cpu: bool, parts: int) -> tuple[int, int]:
    """The bytes of a model's parameters, and of the panels that a CPU makes of its kernels.

    Where devices share them in so many parts, they are those of one device.
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
    """Forgets compiled programs once half of the memory maps are taken that a process may have.

    On a CPU every program takes some, and without one left the compiler ends the process. Linux
    alone has such a limit.
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
    """How many rows, up to `most`, fit with the weights in the present device's memory."""
    found = need(models, gamma, max_length, tree=tree, shards=shards)
    free = device_bytes()[1] - found.weights
    return max(1, min(most, int(0.5 * free) // (found.caches + found.activations)))


def require_batch(
    names: tuple[str, str],
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    size: int,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> None:
    """Raises ValueError unless the present device holds a batch of so many rows of a pair."""
    most = batch(models, gamma, max_length, size, tree, shards)
    if most < size:
        raise ValueError(
            f"{size} rows of {names[0]} with {names[1]} do not fit the memory of "
            f"{device_bytes()[0]}; the largest batch that does has {most}."
        )


def require(config: RowConfig, models: Sequence[Config], source_length: int = 512) -> None:
    """Raises ValueError unless the present device holds the models of a row."""
    given = config.gamma, config.max_length, source_length, config.tree, config.shards
    require_text((config.target, config.draft), models, *given)


def require_text(
    names: tuple[str, str],
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    source_length: int,
    tree: int = 0,
    shards: Sequence[int] = (1, 1),
) -> None:
    """Raises ValueError unless the present device holds a pair and a text of such a length."""
    found = need(models, gamma, max_length, source_length, tree, shards)
    name, there = device_bytes()
    if sum(found) > there:
        parts = found._asdict().items()
        made_of = ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts if size)
        raise ValueError(
            f"{names[0]} with {names[1]} needs {sum(found) / 2**30:.1f} GiB for texts of "
            f"{source_length:,} tokens, but {name} has {there / 2**30:.1f} GiB ({made_of}): take a "
            "narrower dtype, int8 (--quantize=int8), smaller models, shorter texts, several "
            "devices (--mesh) or another one."
        )
