"""What the configurations of all families have in common."""

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
"""Layers as Vaswani et al. have them."""


AXES = {"kernel": 0, "embedding": 1}
"""The axis along which int8 values share a scale, by the last part of a parameter's name."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model and the kinds of its layers; field names are T5X's where it has one.

    The defaults are those of T5 v1.1. A family adds its numbers of layers. A value outside its
    range, or a combination that is not implemented, is a ValueError.
    """

    vocab_size: int  # Rows V of the embedding (may be padded beyond the vocabulary's pieces).
    emb_dim: int  # Features D.
    num_heads: int  # Attention heads N.
    head_dim: int  # Size H of a head.
    mlp_dim: int  # Features of the feed-forward layer.
    _: dataclasses.KW_ONLY
    num_kv_heads: int = 0  # Of keys and values, each for as many queries' heads; 0: num_heads.
    mlp_activations: tuple[str, ...] = ("gelu", "linear")  # A gated GELU; ("relu",) has no gate.
    # "rms" divides by the root mean square and scales, "rms_of_1" by 1 more; "layer" takes the mean
    # away, divides by the standard deviation, scales and shifts.
    norm: str = "rms"
    # "relative" adds a bias to attention's scores, learned for each bucket of distances; "learned"
    # adds an embedding of each position to the tokens'; "rotary" turns queries and keys (`rope`).
    positions: str = "relative"
    max_positions: int = 0  # That a text may have; 0 where they are relative.
    biases: bool = False  # Of projections, except the one to the logits.
    qkv_biases: bool = False  # Of those to queries, keys and values alone.
    head_norms: bool = False  # Whether each head's queries and keys are normed.
    post_norms: bool = False  # Whether what a layer's parts add is normed, too.
    score_cap: float = 0.0  # C of attention's soft cap C tanh(score / C); 0: none.
    logits_cap: float = 0.0  # Likewise of the logits.
    # Whether products of queries and keys are multiplied by H^-1/2; T5's initial weights have it.
    scaled_attention: bool = False
    logits_via_embedding: bool = False  # Whether the output is tied to the embedding.
    # Whether encoder and decoder embed tokens by one table; else the decoder has its own, and
    # logits that are tied are tied to the encoder's.
    shared_embedding: bool = True
    dropout_rate: float = 0.0  # In training only.
    dtype: str = "float32"  # Or "bfloat16", of the products; logits and softmax are float32.
    # How kernels are held in memory, one of `types.QUANTIZE`; "none" is as `dtype` says.
    quantize: str = "none"
    # Whether one table of relative positions serves all layers of a stack, as in T5; in umT5 each
    # layer has its own.
    shared_positions: bool = True
    num_buckets: int = 32  # Of relative positions.
    max_distance: int = 128  # From which on all positions share the last bucket.
    reads: Reads = Reads()  # Of a draft alone: what it reads of its target.

    depths: ClassVar[tuple[str, ...]]  # The fields that count layers, the decoder's last.
    may_be_0: ClassVar[tuple[str, ...]] = ("num_kv_heads", "max_positions")
    fixed: ClassVar[Fields] = {}  # Fields of which a family implements one value alone.

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder; each keeps a key and a value of every token."""
        return getattr(self, self.depths[-1])

    @property
    def encoder_layers(self) -> int:
        """Layers of the encoder; 0 where there is none."""
        return getattr(self, self.depths[0]) if len(self.depths) > 1 else 0

    @property
    def of_encoder(self) -> Self:
        """The sizes of the encoder, where they are others than the decoder's."""
        return self

    @property
    def logits(self) -> int:
        """How many tokens logits are of."""
        kept = self.reads.draft_vocabulary
        return len(unpacked(kept)) if kept else self.vocab_size

    @property
    def precision(self) -> str:
        """The number formats of products and, where they have their own, of kernels."""
        return self.dtype if self.quantize == "none" else f"{self.dtype}, {self.quantize}"

    def in_int8(self, name: str) -> bool:
        """Whether `quantize` is about a parameter, by its whole name: kernels, and tied logits."""
        tied = self.logits_via_embedding and name == "token_embedder/embedding"
        return self.quantize != "none" and (tied or name.endswith("/kernel"))

    @property
    def epsilon(self) -> float:
        """What a norm adds to the variance: T5's and GPT-2's, by the kind of norm."""
        return 1e-5 if self.norm == "layer" else 1e-6

    @property
    def kv_heads(self) -> int:
        """Heads K of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def score_scale(self) -> float:
        """What multiplies products of queries and keys."""
        return self.head_dim**-0.5 if self.scaled_attention else 1.0

    def rope(self, layer: int) -> Rope | None:
        """How a layer of the decoder turns queries and keys by their positions, if it does."""
        return None

    def window(self, layer: int) -> int:
        """Keys that a query of such a layer sees, its own the last of them; 0: all before it."""
        return 0

    @property
    def gated(self) -> bool:
        """Whether a feed-forward layer has two inputs, which are multiplied."""
        return len(self.mlp_activations) == 2

    def description(self) -> tuple[str, str]:
        """The family of the model, and its layers, for people."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """The configuration of the fields that `to_json` gave, or an older version's."""
        others = dict(fields)
        read = [field.name for field in dataclasses.fields(Reads) if field.name in fields]
        reads = Reads(**{name: others.pop(name) for name in read})
        return cls(**others, reads=reads)

    def to_json(self) -> Fields:
        """The fields as JSON-ready values, but for `quantize`, which is not the model's own."""
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
                # From JSON or gin; it would make the configuration unhashable, hence no jit key.
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
                self._refuse(field.name, f"{self.fixed[field.name]!r}, all that is implemented")
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
        alone = not self.shared_embedding and not self.encoder_layers
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
            (alone, "shared_embedding", "True where there is no encoder"),
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
    """So many layers, for people: ``count(1, "decoder layer")`` is "1 decoder layer"."""
    return f"{number} {noun}{'s' * (number != 1)}"
