"""What a row needs of a device's memory, from shapes alone, and whether the device has it."""

import dataclasses
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from speculative.models import Config, abstract_params
from speculative.rows.config import RowConfig

TPU_V4 = 32 * 2**30  # Bytes of memory of a TPU v4 chip.


@dataclasses.dataclass(frozen=True)
class Need:
    """What a model needs at batch size 1, in bytes."""

    name: str
    parameters: int
    dtype: str  # Of weights and caches.
    weights: int
    caches: int  # Keys and values, of self- and cross-attention.
    # The most that is alive at once: in the encoder's feed-forward layer and attention, or in a
    # verify pass and its logits.
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.caches + self.activations


def needs(config: RowConfig, models: Sequence[Config], source_length: int = 512) -> list[Need]:
    """What the models of a row need: its target and, where it is a model, its draft."""
    names = (config.target, config.draft)[: len(models)]
    return [_need(config, *named, source_length) for named in zip(names, models, strict=True)]


def _need(config: RowConfig, name: str, model: Config, source_length: int) -> Need:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model)))
    size, gamma = jnp.dtype(model.dtype).itemsize, config.gamma or 7
    room = config.decoding(model.vocab_size, gamma).cache_lengths()[-1]
    head, width = model.num_heads * model.head_dim, gamma + 1
    # Of the text and of the source, which is in the same caches where it is a prompt.
    caches = 2 * model.decoder_layers * head * (room + source_length) * size
    encoder = source_length * (2 * model.mlp_dim + 4 * model.emb_dim) * size
    encoder += model.num_heads * source_length**2 * 4
    # Logits and probabilities are float32, the target's and those of every guess.
    verify = 4 * width * model.vocab_size * 4 + width * (2 * model.mlp_dim + 4 * head) * size
    return Need(name, parameters, model.dtype, parameters * size, caches, max(encoder, verify))


def device_bytes() -> tuple[str, int]:
    """The present device, for people, and the bytes of its memory."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind, (device.memory_stats() or {}).get("bytes_limit", 2**63)
    return "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def batch(config: RowConfig, models: Sequence[Config], most: int) -> int:
    """How many rows, up to `most`, fit with the weights in the present device's memory."""
    found = needs(config, models)
    row = sum(need.caches + need.activations for need in found)
    free = device_bytes()[1] - sum(need.weights for need in found)
    return max(1, min(most, int(0.5 * free) // row))


def require(config: RowConfig, models: Sequence[Config], source_length: int = 512) -> None:
    """Raises ValueError unless the present device holds the models of a row."""
    found = needs(config, models, source_length)
    needed = sum(need.total for need in found)
    if jax.default_backend() == "cpu":
        # There kernels are copied to another layout, in float32, beside those of the checkpoint.
        needed += sum(4 * need.parameters for need in found)
    name, there = device_bytes()
    if needed > there:
        raise ValueError(
            f"{config.target} with {config.draft} needs {needed / 2**30:.1f} GiB, but {name} has "
            f"{there / 2**30:.1f} GiB: take a narrower dtype, smaller models or another device."
        )
