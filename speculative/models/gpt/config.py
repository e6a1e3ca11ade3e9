"""The configuration of decoder-only models, and the named sizes."""

import dataclasses
from typing import Any, Self

from speculative.models.config import PLAIN, Config, count
from speculative.types import Fields

LAMDA: dict[str, Any] = {
    "mlp_activations": ("gelu", "linear"),
    "norm": "rms",
    "positions": "relative",
    "biases": False,
    "scaled_attention": False,
}
"""The layers of a T5 v1.1 (LaMDA: Thoppilan et al., 2022, section 4)."""


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig(Config):
    """The sizes of a decoder-only model: by default a GPT's; with the fields `LAMDA`, a LaMDA's."""

    num_layers: int
    _: dataclasses.KW_ONLY
    mlp_activations: tuple[str, ...] = ("gelu",)
    norm: str = "layer"
    positions: str = "learned"
    biases: bool = True
    scaled_attention: bool = True
    logits_via_embedding: bool = True

    depths = ("num_layers",)
    fixed = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads.source_dim and not self.reads.target_layers:
            raise ValueError(
                "Reads.source_dim must be 0 where there are no target_layers, in a decoder-only "
                f"model; not {self.reads.source_dim}."
            )

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """See `Config.from_json`; the first version marked a GPT only by its learned positions."""
        return super().from_json((GPT if fields.get("max_positions") else LAMDA) | dict(fields))

    def description(self) -> tuple[str, str]:
        """A GPT or a LaMDA, by its positions."""
        tied = "tied" if self.logits_via_embedding else "untied"
        layers = count(self.num_layers, "decoder layer")
        if self.positions == "learned":
            return f"GPT ({tied} logits)", f"{layers}, {self.max_positions:,} positions"
        activation = "gated " * self.gated + self.mlp_activations[0].upper()
        return f"LaMDA-like ({activation}, {tied} logits)", f"{layers}, relative positions"


GPT = {name: getattr(DecoderOnlyConfig, name) for name in LAMDA}
"""The layers of Radford et al. (2019), which are the defaults."""


def _gpt(vocab_size: int, emb_dim: int, layers: int, tied: bool = True) -> DecoderOnlyConfig:
    sizes = vocab_size, emb_dim, emb_dim // 64, 64, 4 * emb_dim, layers
    return DecoderOnlyConfig(*sizes, max_positions=1024, logits_via_embedding=tied)


def _lamda(emb_dim: int, layers: int) -> DecoderOnlyConfig:
    return DecoderOnlyConfig(32000, emb_dim, emb_dim // 64, 128, 8 * emb_dim, layers, **LAMDA)


SIZES = {
    "gpt_97m": _gpt(8192, 768, 12, tied=False),
    "gpt_6m": _gpt(8192, 256, 2, tied=False),
    "gpt2": _gpt(50257, 768, 12),
    "gpt2_medium": _gpt(50257, 1024, 24),
    "gpt2_large": _gpt(50257, 1280, 36),
    "gpt2_xl": _gpt(50257, 1600, 48),
    "lamda_137b": _lamda(8192, 64),
    "lamda_8b": _lamda(4096, 16),
    "lamda_2b": _lamda(2560, 10),
    "lamda_100m": _lamda(768, 4),
}
"""The GPT-like pair of Leviathan et al., section 4.1 (8k pieces; untied, as their counts show);
GPT-2's; LaMDA's, where only the parameter count of the smallest is known."""
