"""The shapes of T5s, and those that have names."""

import dataclasses
from typing import Any

from speculative.models.config import Config, count


@dataclasses.dataclass(frozen=True)
class T5Config(Config):
    """The sizes of a T5 encoder-decoder.

    In v1.1 the feed-forward layer is gated and the output untied; v1.0 has ("relu",) and ties the
    output to the embedding, scaled by D^-1/2.
    """

    num_encoder_layers: int  # 0 where `source_dim` is not.
    num_decoder_layers: int

    depths = ("num_encoder_layers", "num_decoder_layers")
    may_be_0 = (*Config.may_be_0, "num_encoder_layers")
    fixed = {"norm": "rms", "positions": "relative", "biases": False, "scaled_attention": False}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source_dim == 0) == (self.num_encoder_layers == 0):
            raise ValueError(
                "A model has an encoder of its own or reads another's: one of "
                "T5Config.num_encoder_layers and T5Config.source_dim must be 0, not "
                f"{self.num_encoder_layers} and {self.source_dim}."
            )

    def description(self) -> tuple[str, str]:
        """The version, and the layers of both stacks."""
        tied = "tied" if self.logits_via_embedding else "untied"
        encoder = count(self.num_encoder_layers, "encoder layer")
        if self.source_dim:
            encoder = f"reads its target's encoder of {self.source_dim} features"
        version = "v1.1 (gated GELU" if self.gated else "v1.0 (ReLU"
        layers = f"{encoder}, {count(self.num_decoder_layers, 'decoder layer')}"
        return f"T5 {version}, {tied} logits)", layers


V1_0: dict[str, Any] = {"mlp_activations": ("relu",), "logits_via_embedding": True}


def _t5(
    emb_dim: int, mlp_dim: int, num_heads: int, layers: int, head_dim: int = 64, **version: Any
) -> T5Config:
    return T5Config(32128, emb_dim, num_heads, head_dim, mlp_dim, layers, layers, **version)


SIZES = {
    "t5_1_1_small": _t5(512, 1024, 6, 8),
    "t5_1_1_base": _t5(768, 2048, 12, 12),
    "t5_1_1_large": _t5(1024, 2816, 16, 24),
    "t5_1_1_xl": _t5(2048, 5120, 32, 24),
    "t5_1_1_xxl": _t5(4096, 10240, 64, 24),
    "t5_small": _t5(512, 2048, 8, 6, **V1_0),
    "t5_base": _t5(768, 3072, 12, 12, **V1_0),
    "t5_large": _t5(1024, 4096, 16, 24, **V1_0),
    "t5_3b": _t5(1024, 16384, 32, 24, 128, **V1_0),
    "t5_11b": _t5(1024, 65536, 128, 24, 128, **V1_0),
}
"""Raffel et al.'s v1.1 (gated GELU, untied) and v1.0 (ReLU, tied)."""
