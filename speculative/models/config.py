"""The shapes of models, and the shapes that have names."""

import dataclasses
from typing import Any, ClassVar, Self

ACTIVATIONS = ("gelu", "relu", "linear")
"""In the order of `Activation` in kernels.cc."""


class _Sizes:
    """What configurations of either kind can do."""

    def replace(self, **changes: Any) -> Self:
        """The same configuration with some fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        fields = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]
        return fields | {"mlp_activations": list(fields["mlp_activations"])}


@dataclasses.dataclass(frozen=True)
class T5Config(_Sizes):
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

    gpt: ClassVar[bool] = False
    """Its layers are T5's: see `DecoderOnlyConfig.gpt`."""

    def __post_init__(self) -> None:
        _check(self, may_be_0=("source_dim", "num_encoder_layers"))
        if (self.source_dim == 0) == (self.num_encoder_layers == 0):
            raise ValueError(
                "A model has an encoder of its own or reads another's: one of "
                "T5Config.num_encoder_layers and T5Config.source_dim must be 0, not "
                f"{self.num_encoder_layers} and {self.source_dim}."
            )


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig(_Sizes):
    """The sizes of a decoder-only model: a GPT's, or a LaMDA's, whose layers are T5's.

    Attributes:
        vocab_size: rows V of the embedding (may be padded beyond the vocabulary's pieces).
        emb_dim: features D.
        num_heads: attention heads N.
        head_dim: size H of a head.
        mlp_dim: features of the feed-forward layer.
        num_layers: layers.
        max_positions: learned positions, which make it a GPT: layer norms with mean and shift,
            projections with biases, attention scaled by H^-1/2 (Radford et al., 2019). 0: a
            T5's layers, with its relative positions (LaMDA: Thoppilan et al., 2022, section 4).
        mlp_activations: ("gelu",) is GPT's, ("gelu", "linear") LaMDA's gated GELU.
        logits_via_embedding: whether the output is tied to the embedding, as GPT's is.
        dropout_rate: used in training only.
        dtype: "float32" or "bfloat16", of the products; logits and softmax are float32.
        num_buckets: relative-position buckets.
        max_distance: distance from which all positions share the last bucket.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    max_positions: int = 0
    mlp_activations: tuple[str, ...] = ("gelu",)
    logits_via_embedding: bool = True
    dropout_rate: float = 0.0
    dtype: str = "float32"
    num_buckets: int = 32
    max_distance: int = 128

    source_dim: ClassVar[int] = 0
    """It reads no source beside its own text: see `T5Config.source_dim`."""

    def __post_init__(self) -> None:
        _check(self, may_be_0=("max_positions",))
        if self.gpt and len(self.mlp_activations) > 1:
            raise ValueError(
                "A GPT's feed-forward layer is not gated: DecoderOnlyConfig.mlp_activations must "
                f"name one, not {', '.join(self.mlp_activations)}, where max_positions is not 0."
            )

    @property
    def gpt(self) -> bool:
        """Whether norms have a mean and a shift, projections a bias, and attention a scale."""
        return self.max_positions > 0


Config = T5Config | DecoderOnlyConfig
"""The sizes of a model of either kind."""


def _check(config: Config, may_be_0: tuple[str, ...]) -> None:
    """Raises ValueError for a field outside its range, and makes the activations hashable."""
    name = type(config).__name__
    # A list from JSON or gin would make the configuration unhashable, hence no jit key.
    object.__setattr__(config, "mlp_activations", tuple(config.mlp_activations))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name in may_be_0 else 1
        if field.type in (int, "int") and (not isinstance(value, int) or value < least):
            kind = "positive" if least else "non-negative"
            raise ValueError(f"{name}.{field.name} must be a {kind} whole number, not {value!r}.")
    if unknown := [a for a in config.mlp_activations if a not in ACTIVATIONS]:
        raise ValueError(
            f"{name}.mlp_activations has {unknown[0]!r}; known: {', '.join(ACTIVATIONS)}."
        )
    if len(config.mlp_activations) not in (1, 2):
        raise ValueError(
            f"{name}.mlp_activations must name one or two, not {len(config.mlp_activations)}."
        )
    if config.num_buckets < 4 or config.num_buckets % 4:
        raise ValueError(f"{name}.num_buckets must be a multiple of 4, not {config.num_buckets}.")
    if config.max_distance <= config.num_buckets // 2:
        raise ValueError(
            f"{name}.max_distance must be above {config.num_buckets // 2}, half the buckets, "
            f"not {config.max_distance}."
        )
    if config.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{name}.dtype must be float32 or bfloat16, not {config.dtype!r}.")
    if not 0 <= config.dropout_rate < 1:
        raise ValueError(f"{name}.dropout_rate must lie in [0, 1), not {config.dropout_rate}.")


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


def _gpt(vocab_size: int, emb_dim: int, layers: int, tied: bool = True) -> DecoderOnlyConfig:
    return DecoderOnlyConfig(
        vocab_size,
        emb_dim,
        emb_dim // 64,
        64,
        4 * emb_dim,
        layers,
        max_positions=1024,
        logits_via_embedding=tied,
    )


def _lamda(emb_dim: int, layers: int) -> DecoderOnlyConfig:
    return DecoderOnlyConfig(
        32000,
        emb_dim,
        emb_dim // 64,
        128,
        8 * emb_dim,
        layers,
        mlp_activations=("gelu", "linear"),
    )


SIZES: dict[str, Config] = {
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
"""Sizes by name: Raffel et al.'s v1.1 (gated GELU, untied) and v1.0 (ReLU, tied); the GPT-like
pair of Leviathan et al., section 4.1 (8k pieces; untied, as their counts tell); GPT-2's; LaMDA's
(Thoppilan et al., 2022), of whose smallest only the number of parameters is known."""


def named(size: str, **changes: Any) -> Config:
    """The configuration of a public size, e.g. ``named("t5_1_1_xxl", dtype="bfloat16")``.

    Raises:
        ValueError: the size is unknown; the message lists the known ones.
    """
    if size not in SIZES:
        raise ValueError(f"Unknown model size {size!r}; known: {', '.join(SIZES)}.")
    return SIZES[size].replace(**changes)
