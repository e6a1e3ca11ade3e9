"""The configuration that all families share."""

import dataclasses
from typing import ClassVar, Self

from speculative.models.reads import Reads, unpacked
from speculative.models.rope import Rope
from speculative.types import ACTIVATIONS, QUANTIZE, Fields

_CHOICES = {
    "norm": ("rms", "rms_of_1", "layer"),
    "positions": ("relative", "learned", "rotary"),
    "dtype": ("float32", "bfloat16"),
    "quantize": QUANTIZE,
}


PLAIN: Fields = {
    "num_kv_heads": 0,
    "qkv_biases": False,
    "head_norms": False,
    "post_norms": False,
    "score_cap": 0.0,
    "logits_cap": 0.0,
}
"""The plain layers of Vaswani et al."""


AXES = {"kernel": 0, "embedding": 1}
"""The axis along which int8 values share a scale, by the last part of a parameter's name."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model and the kinds of its layers; fields that T5X has keep its names.

    The defaults are those of T5 v1.1. A family adds its layer counts. A value out of range, or an
    unimplemented combination, raises ValueError.
    """

    vocab_size: int  # Rows V of the embedding (may be padded beyond the vocabulary's pieces).
    emb_dim: int  # Features D.
    num_heads: int  # Attention heads N.
    head_dim: int  # Size H of a head.
    mlp_dim: int  # Features of the feed-forward layer.
    _: dataclasses.KW_ONLY
    num_kv_heads: int = 0  # Key and value heads, each serving equally many queries; 0: num_heads.
    mlp_activations: tuple[str, ...] = ("gelu", "linear")  # A gated GELU; ("relu",) has no gate.
    # "rms" divides by the root mean square and scales; "rms_of_1" adds 1 to the scale; "layer"
    # subtracts the mean, divides by the standard deviation, scales and shifts.
    norm: str = "rms"
    # "relative" adds to attention scores a bias learned for each bucket of distances; "learned"
    # adds a position embedding to the token's; "rotary" rotates queries and keys (`rope`).
    positions: str = "relative"
    max_positions: int = 0  # The most that a text may have; 0 if they are relative.
    biases: bool = False  # On all projections except the one to the logits.
    qkv_biases: bool = False  # On those to queries, keys and values only.
    head_norms: bool = False  # Whether each head's queries and keys are normed.
    post_norms: bool = False  # Whether a layer's parts norm their outputs too.
    score_cap: float = 0.0  # C of the soft cap C tanh(score / C) in attention; 0: none.
    logits_cap: float = 0.0  # The same for logits.
    # Whether query-key products are multiplied by H^-1/2; T5's initial weights include it.
    scaled_attention: bool = False
    logits_via_embedding: bool = False  # Whether the output is tied to the embedding.
    # Whether encoder and decoder share one embedding; otherwise the decoder has its own, and tied
    # logits are tied to the encoder's.
    shared_embedding: bool = True
    dropout_rate: float = 0.0  # Used in training only.
    dtype: str = "float32"  # This or "bfloat16", for products; logits and softmax are float32.
    # How kernels are held in memory, one of `types.QUANTIZE`; "none" means in `dtype`.
    quantize: str = "none"
    # Whether one table of relative positions serves all layers of a stack, as in T5; in umT5 each
    # layer has its own.
    shared_positions: bool = True
    num_buckets: int = 32  # Buckets of relative positions.
    max_distance: int = 128  # All distances from here on share the last bucket.
    reads: Reads = Reads()  # For drafts only: the parts of the target that are read.

    depths: ClassVar[tuple[str, ...]]  # The fields that count layers, the decoder's last.
    may_be_0: ClassVar[tuple[str, ...]] = ("num_kv_heads", "max_positions")
    scales_embedding: ClassVar[bool] = False  # Whether embeddings are multiplied by the root of D.
    fixed: ClassVar[Fields] = {}  # Fields for which a family implements only one value.

    @property
    def decoder_layers(self) -> int:
        """The number of decoder layers; each keeps a key and a value for every token."""
        return getattr(self, self.depths[-1])

    @property
    def encoder_layers(self) -> int:
        """The number of encoder layers; 0 without an encoder."""
        return getattr(self, self.depths[0]) if len(self.depths) > 1 else 0

    @property
    def of_encoder(self) -> Self:
        """The encoder's configuration, whose sizes may differ from the decoder's."""
        return self

    @property
    def logits(self) -> int:
        """The number of tokens that have logits."""
        kept = self.reads.draft_vocabulary
        return len(unpacked(kept)) if kept else self.vocab_size

    @property
    def precision(self) -> str:
        """The number formats of products and, if different, of kernels."""
        return self.dtype if self.quantize == "none" else f"{self.dtype}, {self.quantize}"

    def in_int8(self, name: str) -> bool:
        """Whether `quantize` applies to a parameter, by its full name: kernels and tied logits."""
        tied = self.logits_via_embedding and name == "token_embedder/embedding"
        return self.quantize != "none" and (tied or name.endswith("/kernel"))

    @property
    def epsilon(self) -> float:
        """The epsilon added to a norm's variance, T5's or GPT-2's by the kind of norm."""
        return 1e-5 if self.norm == "layer" else 1e-6

    @property
    def kv_heads(self) -> int:
        """The number K of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def score_scale(self) -> float:
        """The factor on query-key products."""
        return self.head_dim**-0.5 if self.scaled_attention else 1.0

    def rope(self, layer: int) -> Rope | None:
        """How a layer rotates queries and keys by position; None if it does not."""
        return None

    def window(self, layer: int) -> int:
        """How many keys, up to its own, a query of a layer sees; 0: all up to its own."""
        return 0

    def encoder_window(self, layer: int) -> tuple[int, int]:
        """How many keys before its own and after it a query of an encoder's windowed layer sees."""
        return self.window(layer), self.window(layer)

    @property
    def merges_source(self) -> bool:
        """Whether a decoder's self-attention also reads the source, in place of cross-attention."""
        return False

    @property
    def gated(self) -> bool:
        """Whether a feed-forward layer multiplies two projections of its input."""
        return len(self.mlp_activations) == 2

    def description(self) -> tuple[str, str]:
        """The model's family and its layers, in words."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """The configuration from fields that `to_json`, of this or an older version, gave."""
        others = dict(fields)
        read = [field.name for field in dataclasses.fields(Reads) if field.name in fields]
        reads = Reads(**{name: others.pop(name) for name in read})
        return cls(**others, reads=reads)

    def to_json(self) -> Fields:
        """The fields as JSON-ready values, without `quantize`, which is not the model's own."""
        fields = dataclasses.asdict(self)
        del fields["quantize"]
        fields |= fields.pop("reads")
        return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}

    def replace(self, **changes: object) -> Self:
        """The same configuration with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):
                # JSON and gin give lists, which would make the configuration unusable as a jit key.
                object.__setattr__(self, field.name, value := tuple(value))
            least = 0 if field.name in self.may_be_0 else 1
            whole = type(value) is int and least <= value < 2**31
            if field.type in (int, "int") and not whole:
                kind = "positive" if least else "non-negative"
                self._refuse(field.name, f"a {kind} whole number below 2^31")
            if field.type in (bool, "bool") and type(value) is not bool:
                self._refuse(field.name, "True or False")
            if value not in _CHOICES.get(field.name, (value,)):
                self._refuse(field.name, " or ".join(_CHOICES[field.name]))
            if field.name in self.fixed and value != self.fixed[field.name]:
                self._refuse(field.name, f"{self.fixed[field.name]!r}, the only value implemented")
        if unknown := [a for a in self.mlp_activations if a not in ACTIVATIONS]:
            name, known = type(self).__name__, ", ".join(ACTIVATIONS)
            raise ValueError(f"{name}.mlp_activations has {unknown[0]!r}; known: {known}.")
        if kept := self.reads.draft_vocabulary:
            must, last = "Reads.draft_vocabulary must be", unpacked(kept)[-1]
            if last >= self.vocab_size:
                raise ValueError(f"{must} of tokens below {self.vocab_size}, not of {last}.")
            if self.logits_via_embedding:
                raise ValueError(f"{must} empty where logits are tied to the embedding.")
        learned, half = self.positions == "learned", self.num_buckets // 2
        relative = self.positions == "relative"
        divisor = f"a divisor of num_heads, {self.num_heads}, or 0 for as many"
        positions, shared = "0 where positions is 'relative'", "True unless positions is 'relative'"
        unshared = not self.shared_embedding and not self.encoder_layers
        if learned:
            positions = "positive where positions is 'learned' (a configuration of relative "
            positions += "positions needs positions = 'relative')"
        for wrong, field, wanted in (
            (len(self.mlp_activations) not in (1, 2), "mlp_activations", "one or two names"),
            (self.gated and self.biases, "mlp_activations", "one name where biases is True"),
            (self.num_heads % self.kv_heads, "num_kv_heads", divisor),
            (learned and not self.max_positions, "max_positions", positions),
            (relative and self.max_positions, "max_positions", positions),
            (not relative and not self.shared_positions, "shared_positions", shared),
            (unshared, "shared_embedding", "True where there is no encoder"),
            (self.num_buckets < 4 or self.num_buckets % 4, "num_buckets", "a multiple of 4"),
            (self.max_distance <= half, "max_distance", f"above {half}, half the buckets"),
            (not 0 <= self.dropout_rate < 1, "dropout_rate", "in [0, 1)"),
        ):
            if wrong:
                self._refuse(field, wanted)

    def _refuse(self, field: str, wanted: str) -> None:
        name, value = type(self).__name__, getattr(self, field)
        raise ValueError(f"{name}.{field} must be {wanted}, not {value!r}.")


def count(number: int, noun: str) -> str:
    """A count in words: ``count(1, "decoder layer")`` is "1 decoder layer"."""
    return f"{number} {noun}{'s' * (number != 1)}"
