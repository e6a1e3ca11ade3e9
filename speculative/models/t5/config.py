"""The configuration of T5 models, and the named sizes."""

import dataclasses
from typing import Any

from speculative.models.config import PLAIN, Config, count


@dataclasses.dataclass(frozen=True)
class T5Config(Config):
    """The sizes of a T5 encoder-decoder.

    In v1.1 (and Flan-T5, mT5 and ByT5) the feed-forward layer is gated and the output untied; v1.0
    has ("relu",) and ties the output to the embedding, scaled by D^-1/2. UL2's gate is a SiLU;
    each of umT5's layers has its own relative positions.
    """

    num_encoder_layers: int  # 0 in a draft that reads its target's encoder.
    num_decoder_layers: int

    depths = ("num_encoder_layers", "num_decoder_layers")
    may_be_0 = (*Config.may_be_0, "num_encoder_layers")
    fixed = {
        **PLAIN,
        "norm": "rms",
        "positions": "relative",
        "biases": False,
        "scaled_attention": False,
    }

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
        names = {"relu": ("T5 v1.0", "ReLU"), "gelu": ("T5 v1.1", "GELU"), "silu": ("UL2", "SiLU")}
        first = self.mlp_activations[0]
        version, activation = names.get(first, ("T5", first))
        parts = ["gated " * self.gated + activation]
        parts += ["relative positions in every layer"] * (not self.shared_positions)
        parts += ["tied logits" if self.logits_via_embedding else "untied logits"]
        version = version if self.shared_positions else "umT5"
        encoder = count(self.num_encoder_layers, "encoder layer")
        if self.reads.source_dim:
            read = "encoder and decoder" if self.reads.target_layers else "encoder"
            encoder = f"reads its target's {read} of {self.reads.source_dim} features"
        layers = f"{encoder}, {count(self.num_decoder_layers, 'decoder layer')}"
        return f"{version} ({', '.join(parts)})", layers


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


_V1_0: dict[str, Any] = {"mlp_activations": ("relu",), "logits_via_embedding": True}
_V1_1 = {
    "small": (512, 1024, 6, 8),
    "base": (768, 2048, 12, 12),
    "large": (1024, 2816, 16, 24),
    "xl": (2048, 5120, 32, 24),
    "xxl": (4096, 10240, 64, 24),
}

SIZES = {
    **{f"t5_1_1_{size}": _t5(*numbers) for size, numbers in _V1_1.items()},
    "t5_small": _t5(512, 2048, 8, 6, **_V1_0),
    "t5_base": _t5(768, 3072, 12, 12, **_V1_0),
    "t5_large": _t5(1024, 4096, 16, 24, **_V1_0),
    "t5_3b": _t5(1024, 16384, 32, 24, 128, **_V1_0),
    "t5_11b": _t5(1024, 65536, 128, 24, 128, **_V1_0),
    **{f"mt5_{size}": _t5(*numbers, vocab_size=250112) for size, numbers in _V1_1.items()},
    **{
        f"umt5_{size}": _t5(*_V1_1[size], vocab_size=256384, shared_positions=False)
        for size in ("small", "base", "xl", "xxl")
    },
    "byt5_small": _t5(1472, 3584, 6, 12, 64, 4, 384),
    "byt5_base": _t5(1536, 3968, 12, 18, 64, 6, 384),
    "byt5_large": _t5(1536, 3840, 16, 36, 64, 12, 384),
    "byt5_xl": _t5(2560, 6720, 32, 36, 64, 12, 384),
    "byt5_xxl": _t5(4672, 12352, 64, 36, 64, 12, 384),
    "madlad400_3b": _t5(1024, 8192, 16, 32, 128, vocab_size=256_000),
    "madlad400_7b": _t5(2048, 8192, 16, 48, 128, vocab_size=256_000),
    "madlad400_10b": _t5(2048, 16384, 32, 32, 128, vocab_size=256_000),
    "ul2": _t5(4096, 16384, 16, 32, 256, mlp_activations=("silu", "linear")),
}
"""Raffel et al.'s v1.1 (gated GELU, untied; LM-adapted and Flan-T5 too) and v1.0 (ReLU, tied);
mT5's (Xue et al., 2021), umT5's (Chung et al., 2023), ByT5's (Xue et al., 2022), MADLAD-400's
(Kudugunta et al., 2023) and UL2's (Tay et al., 2023; Flan-UL2 too)."""
