"""What a row needs of a device's memory, from shapes alone, and whether the device has it."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from speculative.decoding import Decoding
from speculative.models import Config, abstract_params
from speculative.rows.config import RowConfig

MAPS = pathlib.Path("/proc/self/maps")  # A line for each map of this process's memory.
MOST_MAPS = pathlib.Path("/proc/sys/vm/max_map_count")


@dataclasses.dataclass(frozen=True)
class Need:
    """What a model needs at batch size 1, in bytes."""

    parameters: int
    weights: int
    copies: int  # On a CPU, kernels in another layout, in float32, beside those of the checkpoint.
    caches: int  # Keys and values, of self- and cross-attention.
    # The most that is alive at once: in the encoder's feed-forward layer and attention, or in a
    # verify pass and its logits.
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.copies + self.caches + self.activations


def needs(
    models: Sequence[Config],
    gamma: int | None,
    max_length: int,
    source_length: int = 512,
    cpu: bool = False,
) -> list[Need]:
    """What models need, a target and perhaps a draft, for so many guesses a step (None is 7)."""
    return [_need(model, gamma or 7, max_length, source_length, cpu) for model in models]


def _need(model: Config, gamma: int, max_length: int, source_length: int, cpu: bool) -> Need:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model)))
    size = jnp.dtype(model.dtype).itemsize
    room = Decoding(model.vocab_size, gamma=gamma, max_length=max_length).cache_lengths()[-1]
    head, width = model.num_heads * model.head_dim, gamma + 1
    # Of the text and of the source, which is in the same caches where it is a prompt.
    caches = 2 * model.decoder_layers * head * (room + source_length) * size
    encoder = source_length * (2 * model.mlp_dim + 4 * model.emb_dim) * size
    encoder += model.num_heads * source_length**2 * 4
    # Logits and probabilities are float32, the target's and those of every guess.
    verify = 4 * width * model.vocab_size * 4 + width * (2 * model.mlp_dim + 4 * head) * size
    return Need(
        parameters=parameters,
        weights=parameters * size,
        copies=4 * parameters * cpu,
        caches=caches,
        activations=max(encoder, verify),
    )


def device_bytes() -> tuple[str, int]:
    """The present device, for people, and the bytes of its memory."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind, (device.memory_stats() or {}).get("bytes_limit", 2**63)
    return "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def spare_maps() -> None:
    """Forgets compiled programs once half of the memory maps are taken that a process may have.

    On a CPU every program takes some, and without one left the compiler ends the process. Linux
    alone has such a limit.
    """
    try:
        taken, most = MAPS.read_bytes().count(b"\n"), int(MOST_MAPS.read_text())
    except (OSError, ValueError):
        return
    if 2 * taken > most:
        jax.clear_caches()


def batch(models: Sequence[Config], gamma: int | None, max_length: int, most: int) -> int:
    """How many rows, up to `most`, fit with the weights in the present device's memory."""
    found = needs(models, gamma, max_length)
    row = sum(need.caches + need.activations for need in found)
    free = device_bytes()[1] - sum(need.weights for need in found)
    return max(1, min(most, int(0.5 * free) // row))


def require_batch(
    names: tuple[str, str], models: Sequence[Config], gamma: int | None, max_length: int, size: int
) -> None:
    """Raises ValueError unless the present device holds a batch of so many rows of a pair."""
    most = batch(models, gamma, max_length, size)
    if most < size:
        raise ValueError(
            f"{size} rows of {names[0]} with {names[1]} do not fit the memory of "
            f"{device_bytes()[0]}; the largest batch that does has {most}."
        )


def require(config: RowConfig, models: Sequence[Config], source_length: int = 512) -> None:
    """Raises ValueError unless the present device holds the models of a row."""
    cpu = jax.default_backend() == "cpu"
    found = needs(models, config.gamma, config.max_length, source_length, cpu)
    needed = sum(need.total for need in found)
    name, there = device_bytes()
    if needed > there:
        parts = {
            part: sum(getattr(need, part) for need in found)
            for part in ("weights", "copies", "caches", "activations")
        }
        made_of = ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts.items() if size)
        raise ValueError(
            f"{config.target} with {config.draft} needs {needed / 2**30:.1f} GiB, but {name} has "
            f"{there / 2**30:.1f} GiB ({made_of}): take a narrower dtype, smaller models or "
            "another device."
        )
