"""The configuration of T5Gemma 2 models, and the named sizes."""

import dataclasses
from typing import ClassVar

from speculative.models.config import count
from speculative.models.rotary import GemmaLayersConfig
from speculative.types import Fields


@dataclasses.dataclass(frozen=True)
class T5Gemma2Config(GemmaLayersConfig):
    """The sizes of an encoder-decoder of Gemma 3's layers, which share one embedding.

    A decoder's self-attention reads the source too, whose keys it does not rotate (Zhang et al.,
    2025, arXiv 2512.14856). A draft that reads its target's encoder attends to it separately.
    """

    num_encoder_layers: int  # 0 in a draft that reads its target's encoder.
    num_decoder_layers: int
    _: dataclasses.KW_ONLY
    head_norms: bool = True

    depths = ("num_encoder_layers", "num_decoder_layers")
    may_be_0 = (*GemmaLayersConfig.may_be_0, "num_encoder_layers")
    fixed: ClassVar[Fields] = {**GemmaLayersConfig.fixed, "head_norms": True}

    @property
    def merges_source(self) -> bool:
        """See `Config.merges_source`; a draft that reads its target does not."""
        return not self.reads.source_dim

    def encoder_window(self, layer: int) -> tuple[int, int]:
        """See `Config.encoder_window`: half of the window lies on each side."""
        size = self.window(layer)
        return (size + 1) // 2 - 1, size // 2

    def description(self) -> tuple[str, str]:
        """The layers of both stacks."""
        encoder = count(self.num_encoder_layers, "encoder layer")
        return "T5Gemma 2", f"{encoder}, {count(self.num_decoder_layers, 'decoder layer')}"


def _t5gemma2(
    emb_dim: int, heads: int, kv_heads: int, mlp_dim: int, layers: int, **more: int
) -> T5Gemma2Config:
    return T5Gemma2Config(
        *(262_144, emb_dim, heads, 256, mlp_dim, layers, layers),
        num_kv_heads=kv_heads,
        max_positions=more.get("positions", 32_768),
        windows=(*[more.get("window", 512)] * 5, 0),
        rope_base=1e6,
        rope_factor=8.0,
        window_rope_base=1e4,
        query_scalar=256.0,
    )


SIZES = {
    "t5gemma2_270m_270m": _t5gemma2(640, 4, 1, 2048, 18),
    "t5gemma2_1b_1b": _t5gemma2(1152, 4, 1, 6912, 26),
    "t5gemma2_4b_4b": _t5gemma2(2560, 8, 4, 10240, 34, window=1024, positions=131_072),
}
"""Both stacks have the sizes of a Gemma 3."""
