"""What a row needs of a device's memory, from shapes alone, and whether the device has it."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from speculative.drafts.named import MODEL_FREE
from speculative.experiments import weights
from speculative.experiments.settings import RowConfig
from speculative.models import Config, T5Config, abstract_params

TPU_V4 = 32 * 2**30
"""Bytes of memory of a TPU v4 chip."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes that a model needs at batch size 1.

    Attributes:
        name: of the model.
        parameters: how many numbers.
        dtype: of weights and caches.
        weights: bytes of the parameters in the row's dtype.
        caches: bytes of keys and values, self- and cross-attention.
        activations: bytes of what is alive at once, at most: in the encoder's feed-forward layer
            and attention, or in a verify pass and its logits.
    """

    name: str
    parameters: int
    dtype: str
    weights: int
    caches: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.caches + self.activations


def needs(config: RowConfig, source_length: int = 512) -> list[Need]:
    """What target and draft of a row need; a model-free draft's need is left out.

    Raises:
        ValueError: a model's sizes cannot be told from its name or checkpoint.
    """
    names = [config.target, *([] if config.draft in MODEL_FREE else [config.draft])]
    return [_need(config, name, weights.sizes(config, name), source_length) for name in names]


def _need(config: RowConfig, name: str, model: Config, source_length: int) -> Need:
    shapes = jax.tree.leaves(abstract_params(model))
    parameters = sum(leaf.size for leaf in shapes)
    size = jnp.dtype(model.dtype).itemsize
    room = config.decoding(model.vocab_size, config.gamma or 7).cache_lengths()[-1]
    head = model.num_heads * model.head_dim
    layers = model.num_decoder_layers if isinstance(model, T5Config) else model.num_layers
    # Of the text and, beside it, of the source: in the same caches where it is a prompt.
    caches = 2 * layers * head * (room + source_length) * size
    width = (config.gamma or 7) + 1
    encoder = source_length * (2 * model.mlp_dim + 4 * model.emb_dim) * size
    encoder += model.num_heads * source_length**2 * 4
    # Logits and probabilities are float32, the target's and those of every guess.
    verify = 4 * width * model.vocab_size * 4 + width * (2 * model.mlp_dim + 4 * head) * size
    return Need(name, parameters, model.dtype, parameters * size, caches, max(encoder, verify))


def device_bytes() -> tuple[str, int]:
    """The present device, for people, and the bytes of its memory."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        meminfo = pathlib.Path("/proc/meminfo")
        if meminfo.is_file():
            kilobytes = int(meminfo.read_text().split("MemTotal:")[1].split()[0])
            return "this machine", kilobytes * 1024
        return "this machine", 2**63
    stats = device.memory_stats() or {}
    return device.device_kind, stats.get("bytes_limit", 2**63)


def batch(config: RowConfig, most: int) -> int:
    """How many rows, up to `most`, have room beside the weights on the present device."""
    found = needs(config)
    row = sum(need.caches + need.activations for need in found)
    free = device_bytes()[1] - sum(need.weights for need in found)
    return max(1, min(most, int(0.5 * free) // row))


def require(config: RowConfig, source_length: int = 512) -> None:
    """Raises ValueError unless both models of a row exist and the present device holds them."""
    weights.require(config)
    found = needs(config, source_length)
    needed = sum(need.total for need in found)
    if jax.default_backend() == "cpu":
        # Kernels are laid out anew there, in float32, while the checkpoint's are still held.
        needed += sum(4 * need.parameters for need in found)
    name, there = device_bytes()
    if needed > there:
        raise ValueError(
            f"{config.target} with {config.draft} needs {needed / 2**30:.1f} GiB, but {name} has "
            f"{there / 2**30:.1f} GiB: take a narrower dtype, smaller models or another device."
        )


def show(config: RowConfig, present: bool, source_length: int, console: Console) -> bool:
    """Prints what a row needs, and tells whether a TPU v4, or the present device, has it."""
    found = needs(config, source_length)
    table = Table(title=f"Memory at batch size 1, sources of {source_length} tokens", box=None)
    table.add_column("model")
    for head in ("parameters", "dtype", "weights", "caches", "activations", "all"):
        table.add_column(head, justify="right")
    for need in found:
        parts = (need.weights, need.caches, need.activations, need.total)
        numbers = [_amount(part) for part in parts]
        table.add_row(need.name, f"{need.parameters:,}", need.dtype, *numbers)
    console.print(table)
    total = sum(need.total for need in found)
    name, there = device_bytes() if present else ("a TPU v4", TPU_V4)
    fits = total <= there
    word = "fits on" if fits else "does NOT fit on"
    console.print(f"{_amount(total)} {word} {name}, which has {_amount(there)}.", highlight=False)
    return fits


def _amount(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
