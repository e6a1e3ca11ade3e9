"""The configuration of Llama and similar models, and the named sizes."""

import dataclasses
from typing import ClassVar

from speculative.models.config import count
from speculative.models.rotary import RotaryConfig
from speculative.types import Fields


@dataclasses.dataclass(frozen=True)
class LlamaConfig(RotaryConfig):
    """The sizes of a decoder-only model with the layers of a Llama (Touvron et al., 2023).

    Qwen2.5 has biases on queries, keys and values; Qwen3 norms queries and keys.
    """

    num_layers: int

    depths = ("num_layers",)
    fixed: ClassVar[Fields] = {
        **RotaryConfig.fixed,
        "norm": "rms",
        "post_norms": False,
        "score_cap": 0.0,
        "logits_cap": 0.0,
    }

    def description(self) -> tuple[str, str]:
        """The kind, which follows from biases and norms, and the layers."""
        kind = "Qwen3" if self.head_norms else "Qwen2" if self.qkv_biases else "Llama"
        tied = "tied" if self.logits_via_embedding else "untied"
        positions = f"{self.max_positions:,} positions" if self.max_positions else "any position"
        return f"{kind} ({tied} logits)", f"{count(self.num_layers, 'decoder layer')}, {positions}"


def _size(
    vocab_size: int, emb_dim: int, heads: int, head_dim: int, mlp_dim: int, layers: int,
    kv_heads: int, base: float, positions: int, epsilon: float = 1e-6, tied: bool = False,
    factor: float = 1.0, bounds: tuple[float, ...] = (), norms: bool = False,
) -> LlamaConfig:  # fmt: skip
    return LlamaConfig(
        *(vocab_size, emb_dim, heads, head_dim, mlp_dim, layers),
        num_kv_heads=kv_heads, rope_base=base, max_positions=positions, norm_epsilon=epsilon,
        logits_via_embedding=tied, rope_factor=factor, rope_bounds=bounds, head_norms=norms,
    )  # fmt: skip


_LLAMA_3_1 = {"bounds": (1.0, 4.0, 8192.0), "epsilon": 1e-5}

SIZES = {
    "smollm2_135m": _size(49152, 576, 9, 64, 1536, 30, 3, 1e5, 8192, 1e-5, tied=True),
    "llama3_2_1b": _size(
        128256, 2048, 32, 64, 8192, 16, 8, 5e5, 131072, tied=True, factor=32.0, **_LLAMA_3_1
    ),
    "llama3_1_8b": _size(
        128256, 4096, 32, 128, 14336, 32, 8, 5e5, 131072, factor=8.0, **_LLAMA_3_1
    ),
    "qwen3_0_6b": _size(151936, 1024, 16, 128, 3072, 28, 8, 1e6, 40960, tied=True, norms=True),
    "qwen3_8b": _size(151936, 4096, 32, 128, 12288, 36, 8, 1e6, 40960, norms=True),
    "qwen3_32b": _size(151936, 5120, 64, 128, 25600, 64, 8, 1e6, 40960, norms=True),
}
"""Sizes from the published configurations."""
