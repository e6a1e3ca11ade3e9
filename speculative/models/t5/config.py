"""The shapes of T5s, and those that have names."""

import dataclasses
from typing import Any

from speculative.models.config import Config, count


@dataclasses.dataclass(frozen=True)
class T5Config(Config):
    """The sizes of a T5 encoder-decoder.

    In v1.1 (and Flan-T5, mT5 and ByT5) the feed-forward layer is gated and the output untied; v1.0
    has ("relu",) and ties the output to the embedding, scaled by D^-1/2. UL2's gate is a SiLU;
    umT5's layers have relative positions of their own.
    """

    num_encoder_layers: int  # 0 where another's is read.
    num_decoder_layers: int

    depths = ("num_encoder_layers", "num_decoder_layers")
    may_be_0 = (*Config.may_be_0, "num_encoder_layers")
    fixed = {"norm": "rms", "positions": "relative", "biases": False, "scaled_attention": False}

    def __post_init__(self) -> None:
        super().__post_init__()
        source_dim = self.reads.source_dim
        if (source_dim == 0) == (self.num_encoder_layers == 0):
            raise ValueError(
                "A model has an encoder of its own or reads another's: one of "
                "T5Config.num_encoder_layers and Reads.source_dim must be 0, not "
                f"{self.num_encoder_layers} and {source_dim}."
            )

    def description(self) -> tuple[str, str]:
        """The version, and the layers of both stacks."""
        versions = {"relu": "T5 v1.0", "gelu": "T5 v1.1", "silu": "UL2"}
        activations = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}
        first = self.mlp_activations[0]
        parts = ["gated " * self.gated + activations.get(first, first)]
        parts += ["relative positions in every layer"] * (not self.shared_positions)
        parts += ["tied logits" if self.logits_via_embedding else "untied logits"]
        version = versions.get(first, "T5") if self.shared_positions else "umT5"
        encoder = count(self.num_encoder_layers, "encoder layer")
        if self.reads.source_dim:
            read = "encoder and decoder" if self.reads.target_layers else "encoder"
            encoder = f"reads its target's {read} of {self.reads.source_dim} features"
        layers = f"{encoder}, {count(self.num_decoder_layers, 'decoder layer')}"
        return f"{version} ({', '.join(parts)})", layers


V1_0: dict[str, Any] = {"mlp_activations": ("relu",), "logits_via_embedding": True}


UL2: dict[str, Any] = {"mlp_activations": ("silu", "linear")}
UMT5: dict[str, Any] = {"vocab_size": 256384, "shared_positions": False}
MT5: dict[str, Any] = {"vocab_size": 250112}


def _t5(
    emb_dim: int,
    mlp_dim: int,
    num_heads: int,
    layers: int,
    head_dim: int = 64,
    decoder_layers: int = 0,
    vocab_size: int = 32128,
    **version: Any,
) -> T5Config:
    depths = layers, decoder_layers or layers
    return T5Config(vocab_size, emb_dim, num_heads, head_dim, mlp_dim, *depths, **version)


def _byt5(emb_dim: int, mlp_dim: int, num_heads: int, layers: int, decoder: int) -> T5Config:
    return _t5(emb_dim, mlp_dim, num_heads, layers, decoder_layers=decoder, vocab_size=384)


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
    "mt5_small": _t5(512, 1024, 6, 8, **MT5),
    "mt5_base": _t5(768, 2048, 12, 12, **MT5),
    "mt5_large": _t5(1024, 2816, 16, 24, **MT5),
    "mt5_xl": _t5(2048, 5120, 32, 24, **MT5),
    "mt5_xxl": _t5(4096, 10240, 64, 24, **MT5),
    "umt5_small": _t5(512, 1024, 6, 8, **UMT5),
    "umt5_base": _t5(768, 2048, 12, 12, **UMT5),
    "umt5_xl": _t5(2048, 5120, 32, 24, **UMT5),
    "umt5_xxl": _t5(4096, 10240, 64, 24, **UMT5),
    "byt5_small": _byt5(1472, 3584, 6, 12, 4),
    "byt5_base": _byt5(1536, 3968, 12, 18, 6),
    "byt5_large": _byt5(1536, 3840, 16, 36, 12),
    "byt5_xl": _byt5(2560, 6720, 32, 36, 12),
    "byt5_xxl": _byt5(4672, 12352, 64, 36, 12),
    "ul2": _t5(4096, 16384, 16, 32, 256, **UL2),
}
"""Raffel et al.'s v1.1 (gated GELU, untied; LM-adapted and Flan-T5 too) and v1.0 (ReLU, tied);
mT5's (Xue et al., 2021), umT5's (Chung et al., 2023), ByT5's (Xue et al., 2022) and UL2's (Tay et
al., 2023; Flan-UL2 too)."""
