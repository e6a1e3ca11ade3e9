"""The shape of a T5, and the shapes that have names."""

import dataclasses
from typing import Any

ACTIVATIONS = ("gelu", "relu", "linear")
"""In the order of `Activation` in kernels.cc."""


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The sizes of a T5 encoder-decoder; field names are T5X's.

    Attributes:
        vocab_size: rows V of the embedding (may be padded beyond the vocabulary's pieces).
        emb_dim: features D.
        num_heads: attention heads N.
        head_dim: size H of a head.
        mlp_dim: features of the feed-forward layer.
        num_encoder_layers: layers of the encoder.
        num_decoder_layers: layers of the decoder.
        mlp_activations: ("gelu", "linear") is v1.1's gated GELU, ("relu",) is v1.0.
        logits_via_embedding: v1.0 ties the output to the embedding, scaled by D^-1/2.
        dropout_rate: used in training only.
        dtype: "float32" or "bfloat16", of the products; logits and softmax are float32.
        num_buckets: relative-position buckets.
        max_distance: distance from which all positions share the last bucket.
        source_dim: features of another model's encoder, which this one reads in place of one of
            its own (a draft that reads its target's); num_encoder_layers is 0 then. 0: its own.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    logits_via_embedding: bool = False
    dropout_rate: float = 0.0
    dtype: str = "float32"
    num_buckets: int = 32
    max_distance: int = 128
    source_dim: int = 0

    def __post_init__(self) -> None:
        # A list from JSON or gin would make the configuration unhashable, hence no jit key.
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("source_dim", "num_encoder_layers") else 1
            if field.type in (int, "int") and (not isinstance(value, int) or value < least):
                kind = "positive" if least else "non-negative"
                raise ValueError(
                    f"T5Config.{field.name} must be a {kind} whole number, not {value!r}."
                )
        if (self.source_dim == 0) == (self.num_encoder_layers == 0):
            raise ValueError(
                "A model has an encoder of its own or reads another's: one of "
                "T5Config.num_encoder_layers and T5Config.source_dim must be 0, not "
                f"{self.num_encoder_layers} and {self.source_dim}."
            )
        if unknown := [a for a in self.mlp_activations if a not in ACTIVATIONS]:
            raise ValueError(
                f"T5Config.mlp_activations has {unknown[0]!r}; known: {', '.join(ACTIVATIONS)}."
            )
        if len(self.mlp_activations) not in (1, 2):
            raise ValueError(
                f"T5Config.mlp_activations must name one or two, not {len(self.mlp_activations)}."
            )
        if self.num_buckets < 4 or self.num_buckets % 4:
            raise ValueError(
                f"T5Config.num_buckets must be a multiple of 4, not {self.num_buckets}."
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"T5Config.max_distance must be above {self.num_buckets // 2}, half the buckets, "
                f"not {self.max_distance}."
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"T5Config.dtype must be float32 or bfloat16, not {self.dtype!r}.")
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"T5Config.dropout_rate must lie in [0, 1), not {self.dropout_rate}.")

    def replace(self, **changes: Any) -> "T5Config":
        """The same configuration with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return dataclasses.asdict(self) | {"mlp_activations": list(self.mlp_activations)}


def _v1_1(emb_dim: int, mlp_dim: int, num_heads: int, layers: int) -> T5Config:
    return T5Config(32128, emb_dim, num_heads, 64, mlp_dim, layers, layers)


def _v1_0(emb_dim: int, mlp_dim: int, num_heads: int, head_dim: int, layers: int) -> T5Config:
    return T5Config(
        32128,
        emb_dim,
        num_heads,
        head_dim,
        mlp_dim,
        layers,
        layers,
        mlp_activations=("relu",),
        logits_via_embedding=True,
    )


SIZES: dict[str, T5Config] = {
    "t5_1_1_small": _v1_1(512, 1024, 6, 8),
    "t5_1_1_base": _v1_1(768, 2048, 12, 12),
    "t5_1_1_large": _v1_1(1024, 2816, 16, 24),
    "t5_1_1_xl": _v1_1(2048, 5120, 32, 24),
    "t5_1_1_xxl": _v1_1(4096, 10240, 64, 24),
    "t5_small": _v1_0(512, 2048, 8, 64, 6),
    "t5_base": _v1_0(768, 3072, 12, 64, 12),
    "t5_large": _v1_0(1024, 4096, 16, 64, 24),
    "t5_3b": _v1_0(1024, 16384, 32, 128, 24),
    "t5_11b": _v1_0(1024, 65536, 128, 128, 24),
}
"""Raffel et al.'s sizes: v1.1 (gated GELU, untied) and v1.0 (ReLU, tied)."""


def named(size: str, **changes: Any) -> T5Config:
    """The configuration of a public size, e.g. ``named("t5_1_1_xxl", dtype="bfloat16")``.

    Raises:
        ValueError: the size is unknown; the message lists the known ones.
    """
    if size not in SIZES:
        raise ValueError(f"Unknown model size {size!r}; known: {', '.join(SIZES)}.")
    return SIZES[size].replace(**changes)
