"""The configuration of T5Gemma models, and the named sizes."""

import dataclasses
from typing import ClassVar, Self

from speculative.models.config import count
from speculative.models.rotary import GemmaLayersConfig
from speculative.types import Fields

ENCODER = "emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"
"""The sizes in which an encoder may differ."""


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(GemmaLayersConfig):
    """The sizes of an encoder-decoder of Gemma 2's layers (Zhang et al., 2025, arXiv 2504.06225).

    Encoder and decoder have embeddings of their own, and the logits are tied to the decoder's.
    """

    num_encoder_layers: int  # 0 in a draft that reads its target's encoder.
    num_decoder_layers: int
    _: dataclasses.KW_ONLY
    # The encoder's sizes; 0 means the decoder's.
    encoder_emb_dim: int = 0
    encoder_num_heads: int = 0
    encoder_num_kv_heads: int = 0
    encoder_head_dim: int = 0
    encoder_mlp_dim: int = 0

    depths = ("num_encoder_layers", "num_decoder_layers")
    may_be_0 = (
        *GemmaLayersConfig.may_be_0,
        "num_encoder_layers",
        *(f"encoder_{name}" for name in ENCODER),
    )
    fixed: ClassVar[Fields] = {**GemmaLayersConfig.fixed, "head_norms": False}

    @property
    def of_encoder(self) -> Self:
        """The encoder's configuration; never `self`, as the encoder has its own embedding."""
        own = {name: getattr(self, f"encoder_{name}") or getattr(self, name) for name in ENCODER}
        return self.replace(**own, reads=type(self.reads)())

    def description(self) -> tuple[str, str]:
        """The layers of both stacks."""
        encoder = count(self.num_encoder_layers, "encoder layer")
        decoder = count(self.num_decoder_layers, "decoder layer")
        return "T5Gemma", f"{encoder} of {self.of_encoder.emb_dim} features, {decoder}"


# Layers, features, feed-forward features, heads, key heads, and head size.
_SIZES = {
    "s": (8, 512, 1024, 8, 8, 64),
    "b": (12, 768, 2048, 12, 12, 64),
    "l": (24, 1024, 2816, 16, 16, 64),
    "xl": (24, 2048, 5120, 32, 32, 64),
    "2b": (26, 2304, 9216, 8, 4, 256),
    "9b": (42, 3584, 14336, 16, 8, 256),
}


def _t5gemma(encoder: str, decoder: str) -> T5GemmaConfig:
    depth, dim, mlp, heads, kv_heads, size = _SIZES[decoder]
    others = _SIZES[encoder] if encoder != decoder else (0,) * 6
    return T5GemmaConfig(
        *(256_000, dim, heads, size, mlp, _SIZES[encoder][0], depth),
        num_kv_heads=kv_heads,
        max_positions=8192,
        windows=(4096, 0),
        score_cap=50.0,
        logits_cap=30.0,
        query_scalar=float(size),
        encoder_emb_dim=others[1],
        encoder_mlp_dim=others[2],
        encoder_num_heads=others[3],
        encoder_num_kv_heads=others[4],
        encoder_head_dim=others[5],
    )


SIZES = {
    f"t5gemma_{encoder}_{decoder}": _t5gemma(encoder, decoder)
    for encoder, decoder in (
        *((name, name) for name in _SIZES),
        ("9b", "2b"),
    )
}
"""Sizes from the published configurations; `query_scalar` is the head size."""
