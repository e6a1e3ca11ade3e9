"""The configuration of Gemma models, and the named sizes."""

import dataclasses

from speculative.models.config import count
from speculative.models.rotary import GemmaLayersConfig


@dataclasses.dataclass(frozen=True)
class GemmaConfig(GemmaLayersConfig):
    """The sizes of a decoder-only model with the layers of Gemma 2 (arXiv 2408.00118) or 3.

    Gemma 2 caps scores and logits; Gemma 3 (arXiv 2503.19786) norms queries and keys.
    """

    num_layers: int

    depths = ("num_layers",)

    def description(self) -> tuple[str, str]:
        """The kind, which follows from `head_norms`, and the layers."""
        layers = count(self.num_layers, "decoder layer")
        seen = f", windows of {max(self.windows):,}" if any(self.windows) else ""
        kind = "Gemma 3" if self.head_norms else "Gemma 2"
        return kind, f"{layers}, {self.max_positions:,} positions{seen}"


def _gemma_3(emb_dim: int, heads: int, kv_heads: int, mlp_dim: int, layers: int, **more: float):
    sizes = {"head_dim": 256, "window": 1024, "vocab": 262208, "positions": 131072, "factor": 8.0}
    sizes |= more
    return GemmaConfig(
        *(int(sizes["vocab"]), emb_dim, heads, int(sizes["head_dim"]), mlp_dim, layers),
        num_kv_heads=kv_heads,
        max_positions=int(sizes["positions"]),
        head_norms=True,
        windows=(*[int(sizes["window"])] * 5, 0),
        rope_base=1e6,
        rope_factor=sizes["factor"],
        window_rope_base=1e4,
        query_scalar=sizes.get("query_scalar", 256.0),
    )


SIZES = {
    "gemma3_270m": _gemma_3(
        640, 4, 1, 2048, 18, window=512, vocab=262144, positions=32768, factor=1.0
    ),
    "gemma3_1b": _gemma_3(
        1152, 4, 1, 6912, 26, window=512, vocab=262144, positions=32768, factor=1.0
    ),
    "gemma3_4b": _gemma_3(2560, 8, 4, 10240, 34),
    "gemma3_12b": _gemma_3(3840, 16, 8, 15360, 48),
    "gemma3_27b": _gemma_3(5376, 32, 16, 21504, 62, head_dim=128, query_scalar=168.0),
}
"""Sizes from the published configurations."""
