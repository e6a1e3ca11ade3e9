"""How transformers names, stores and describes the models that are read: T5 and GPT-2."""

import abc
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from speculative.models import Config, DecoderOnlyConfig, T5Config
from speculative.vocabulary import EXTRA_IDS, PAIRS, TOKENIZER

SPIECE = "spiece.model"
"""The file of a SentencePiece vocabulary."""


class Stored(NamedTuple):
    """What a tensor of theirs holds.

    Attributes:
        parts: tensors of ours by name, side by side along their last axis.
        transposed: whether it is stored [out, in].
    """

    parts: tuple[str, ...]
    transposed: bool = False


class Architecture(abc.ABC):
    """A kind of model.

    Attributes:
        model_types: what a `config.json` may call it.
        prefix: what names begin with, unless the weights are of the model without its logits.
        passed_over: names behind the prefix of tensors that no model reads, or reads elsewhere.
        copies: tensors that may be missing, each with the one that it is a copy of then.
        vocabularies: files that may hold its vocabulary, the best first.
        extra_ids: sentinels after the vocabulary's pieces where nothing else is said.
    """

    model_types: ClassVar[tuple[str, ...]]
    prefix: ClassVar[str]
    passed_over: ClassVar[re.Pattern[str]]
    copies: ClassVar[Mapping[str, str]]
    vocabularies: ClassVar[tuple[str, ...]]
    extra_ids: ClassVar[int]

    @abc.abstractmethod
    def configuration(self, settings: Mapping[str, Any], place: str) -> Config:
        """The sizes that a `config.json` tells.

        Raises:
            ValueError: a setting is missing, or one that is not supported.
        """

    @abc.abstractmethod
    def names(self, config: Config) -> dict[str, Stored]:
        """What every tensor of such a model holds, by name."""

    @abc.abstractmethod
    def settings(self, config: Config, place: str) -> dict[str, Any]:
        """The `config.json` of such a model.

        Raises:
            ValueError: transformers has none of its kind.
        """


class _T5(Architecture):
    """`T5ForConditionalGeneration`: v1.0, v1.1 and Flan."""

    model_types = ("t5", "mt5")
    prefix = ""
    # Copies of the embedding, and a table that early exports held and no model reads.
    passed_over = re.compile(
        r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight"
        r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    )
    # Logits that are tied but not scaled.
    copies = {"lm_head.weight": "shared.weight"}
    vocabularies = (SPIECE,)
    extra_ids = EXTRA_IDS

    projections = {"q": "query", "k": "key", "v": "value", "o": "out"}
    norms = {
        "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
        "decoder": (
            "pre_self_attention_layer_norm",
            "pre_cross_attention_layer_norm",
            "pre_mlp_layer_norm",
        ),
    }
    attentions = {
        "encoder": {"SelfAttention": "attention"},
        "decoder": {
            "SelfAttention": "self_attention",
            "EncDecAttention": "encoder_decoder_attention",
        },
    }

    def configuration(self, settings: Mapping[str, Any], place: str) -> T5Config:
        usual, tied = ("relu", True) if settings["model_type"] == "t5" else ("gated-gelu", False)
        activation = settings.get("feed_forward_proj", usual)
        activations = {"relu": ("relu",), "gated-gelu": ("gelu", "linear")}
        if activation not in activations:
            raise ValueError(
                f"{place} has the feed_forward_proj {activation!r}; known are "
                f"{', '.join(activations)}."
            )
        _require(settings, place, "layer_norm_epsilon", 1e-6)
        sizes = ("vocab_size", "d_model", "num_heads", "d_kv", "d_ff", "num_layers")
        vocab_size, emb_dim, heads, head_dim, mlp_dim, layers = _sizes(settings, place, sizes)
        return T5Config(
            vocab_size=vocab_size,
            emb_dim=emb_dim,
            num_heads=heads,
            head_dim=head_dim,
            mlp_dim=mlp_dim,
            num_encoder_layers=layers,
            num_decoder_layers=settings.get("num_decoder_layers") or layers,
            mlp_activations=activations[activation],
            # Recent versions say "tied" of every T5, and tell by another name which are scaled.
            logits_via_embedding=settings.get(
                "scale_decoder_outputs", settings.get("tie_word_embeddings", tied)
            ),
            num_buckets=settings.get("relative_attention_num_buckets", 32),
            max_distance=settings.get("relative_attention_max_distance", 128),
        )

    def names(self, config: Config) -> dict[str, Stored]:
        assert isinstance(config, T5Config)
        table = {"shared.weight": Stored(("token_embedder/embedding",))}
        if not config.logits_via_embedding:
            table["lm_head.weight"] = Stored(("decoder/logits_dense/kernel",), True)
        kernels = ("wi", "wo") if len(config.mlp_activations) == 1 else ("wi_0", "wi_1", "wo")
        depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
        for stack, depth in depths.items():
            table[f"{stack}.final_layer_norm.weight"] = Stored((f"{stack}/{stack}_norm/scale",))
            buckets = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            table[buckets] = Stored((f"{stack}/relpos_bias/rel_embedding",), True)
            for i in range(depth):
                ours, theirs = f"{stack}/layers_{i}", f"{stack}.block.{i}.layer"
                for j, norm in enumerate(self.norms[stack]):
                    table[f"{theirs}.{j}.layer_norm.weight"] = Stored((f"{ours}/{norm}/scale",))
                for j, (their_part, part) in enumerate(self.attentions[stack].items()):
                    for letter, projection in self.projections.items():
                        kernel = f"{ours}/{part}/{projection}/kernel"
                        table[f"{theirs}.{j}.{their_part}.{letter}.weight"] = Stored(
                            (kernel,), True
                        )
                last = f"{theirs}.{len(self.attentions[stack])}.DenseReluDense"
                for kernel in kernels:
                    table[f"{last}.{kernel}.weight"] = Stored(
                        (f"{ours}/mlp/{kernel}/kernel",), True
                    )
        return table

    def settings(self, config: Config, place: str) -> dict[str, Any]:
        assert isinstance(config, T5Config)
        if config.source_dim:
            raise ValueError(f"transformers knows no T5 without an encoder, as {place} is.")
        gated = len(config.mlp_activations) == 2
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "vocab_size": config.vocab_size,
            "d_model": config.emb_dim,
            "d_kv": config.head_dim,
            "d_ff": config.mlp_dim,
            "num_layers": config.num_encoder_layers,
            "num_decoder_layers": config.num_decoder_layers,
            "num_heads": config.num_heads,
            "relative_attention_num_buckets": config.num_buckets,
            "relative_attention_max_distance": config.max_distance,
            "dropout_rate": config.dropout_rate,
            "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": "gated-gelu" if gated else "relu",
            "tie_word_embeddings": config.logits_via_embedding,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        }


class _GPT2(Architecture):
    """`GPT2LMHeadModel`, whose kernels are [in, out] as ours are."""

    model_types = ("gpt2",)
    prefix = "transformer."
    # The causal mask, which early versions kept as a buffer, and a copy of the embedding.
    passed_over = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")
    copies = {}
    vocabularies = (TOKENIZER, PAIRS, SPIECE)
    extra_ids = 0

    layer = {
        "ln_1": ("pre_self_attention_layer_norm",),
        "attn.c_attn": ("self_attention/query", "self_attention/key", "self_attention/value"),
        "attn.c_proj": ("self_attention/out",),
        "ln_2": ("pre_mlp_layer_norm",),
        "mlp.c_fc": ("mlp/wi",),
        "mlp.c_proj": ("mlp/wo",),
    }

    def configuration(self, settings: Mapping[str, Any], place: str) -> DecoderOnlyConfig:
        _require(settings, place, "activation_function", "gelu_new", "gelu_pytorch_tanh")
        _require(settings, place, "layer_norm_epsilon", 1e-5)
        _require(settings, place, "scale_attn_weights", True)
        _require(settings, place, "scale_attn_by_inverse_layer_idx", False)
        _require(settings, place, "add_cross_attention", False)
        sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        vocab_size, positions, emb_dim, layers, heads = _sizes(settings, place, sizes)
        if emb_dim % heads:
            raise ValueError(f"{place} has an n_embd of {emb_dim} for an n_head of {heads}.")
        return DecoderOnlyConfig(
            vocab_size=vocab_size,
            emb_dim=emb_dim,
            num_heads=heads,
            head_dim=emb_dim // heads,
            mlp_dim=settings.get("n_inner") or 4 * emb_dim,
            num_layers=layers,
            max_positions=positions,
            logits_via_embedding=settings.get("tie_word_embeddings", True),
        )

    def names(self, config: Config) -> dict[str, Stored]:
        assert isinstance(config, DecoderOnlyConfig)
        table = {
            "transformer.wte.weight": Stored(("token_embedder/embedding",)),
            "transformer.wpe.weight": Stored(("decoder/position_embedder/embedding",)),
        }
        for i in range(config.num_layers):
            for theirs, ours in self.layer.items():
                parts = tuple(f"decoder/layers_{i}/{part}" for part in ours)
                table |= self._weight_and_bias(f"transformer.h.{i}.{theirs}", parts)
        table |= self._weight_and_bias("transformer.ln_f", ("decoder/decoder_norm",))
        if not config.logits_via_embedding:
            table["lm_head.weight"] = Stored(("decoder/logits_dense/kernel",), True)
        return table

    @staticmethod
    def _weight_and_bias(theirs: str, parts: tuple[str, ...]) -> Iterator[tuple[str, Stored]]:
        weight = "scale" if parts[0].endswith("norm") else "kernel"
        yield f"{theirs}.weight", Stored(tuple(f"{part}/{weight}" for part in parts))
        yield f"{theirs}.bias", Stored(tuple(f"{part}/bias" for part in parts))

    def settings(self, config: Config, place: str) -> dict[str, Any]:
        assert isinstance(config, DecoderOnlyConfig)
        if not config.gpt:
            raise ValueError(
                f"transformers knows no decoder of a T5's layers alone, as {place} is."
            )
        if config.num_heads * config.head_dim != config.emb_dim:
            raise ValueError(
                f"The heads of transformers' GPT-2 share its {config.emb_dim} features, but "
                f"{place} has {config.num_heads} of {config.head_dim}."
            )
        if config.mlp_activations != ("gelu",):
            raise ValueError(f"{place} has {config.mlp_activations[0]} where GPT-2 has gelu.")
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.max_positions,
            "n_embd": config.emb_dim,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.mlp_dim,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout_rate),
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": config.logits_via_embedding,
        }


_ALL: tuple[Architecture, ...] = (_T5(), _GPT2())


def described(settings: Mapping[str, Any], place: str) -> tuple[Architecture, Config]:
    """The architecture and the sizes that a `config.json` tells.

    Raises:
        ValueError: it is of another model, or one that is not supported.
    """
    kind = settings.get("model_type")
    for architecture in _ALL:
        if kind in architecture.model_types:
            return architecture, architecture.configuration(settings, place)
    raise ValueError(
        f"{place} is of a {kind!r} model; only T5 (t5, mt5) and GPT-2 (gpt2) are read."
    )


def of(config: Config) -> Architecture:
    """The architecture of a configuration's kind."""
    return _T5() if isinstance(config, T5Config) else _GPT2()


def _require(settings: Mapping[str, Any], place: str, name: str, *supported: Any) -> None:
    """Raises ValueError unless a setting is missing or has one of the values that we compute."""
    if settings.get(name, supported[0]) not in supported:
        raise ValueError(
            f"{place} has the {name} {settings[name]!r}; supported is "
            f"{' or '.join(str(value) for value in supported)}."
        )


def _sizes(settings: Mapping[str, Any], place: str, names: tuple[str, ...]) -> list[int]:
    """The values of settings that must be there and positive."""
    for name in names:
        if name not in settings:
            raise ValueError(f"{place} lacks {name!r}.")
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(
                f"{place} has the {name} {settings[name]!r}; it must be a positive whole number."
            )
    return [settings[name] for name in names]
