"""The names that families with rotary positions share in transformers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from speculative.models.names import Names, Stored
from speculative.models.rope import Rope
from speculative.models.rotary import RotaryConfig
from speculative.types import Fields
from speculative.vocabulary import PAIRS, TOKENIZER

R = TypeVar("R", bound=RotaryConfig)

TOKENIZER_MODEL = "tokenizer.model"  # These families' name for the file of a SentencePiece model.


GEMMA_2: Fields = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
"""The defaults of a `config.json` of Gemma 2, or of a stack of its layers."""


GEMMA_3: Fields = {
    **GEMMA_2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
"""The same of Gemma 3."""


class RotaryNames(Names[R]):
    """Names of decoders, and of encoders, whose kernels are [out, in]."""

    vocabularies = (TOKENIZER, PAIRS, TOKENIZER_MODEL)
    sizes = {
        "vocab_size": "vocab_size",
        "hidden_size": "emb_dim",
        "num_attention_heads": "num_heads",
        "intermediate_size": "mlp_dim",
        "num_hidden_layers": "num_layers",
        "max_position_embeddings": "max_positions",
    }
    aliases = {}
    required = {"attention_bias": (False,)}
    activation: ClassVar[str] = "hidden_act"  # The setting of the feed-forward activation.
    norms: ClassVar[Mapping[str, str]]  # Norms of a layer, and our names for them.
    parts: ClassVar[Mapping[str, str]] = {
        "self_attn.q_proj": "self_attention/query",
        "self_attn.k_proj": "self_attention/key",
        "self_attn.v_proj": "self_attention/value",
        "self_attn.o_proj": "self_attention/out",
        "mlp.gate_proj": "mlp/wi_0",
        "mlp.up_proj": "mlp/wi_1",
        "mlp.down_proj": "mlp/wo",
    }

    def fields(
        self, settings: Fields, own: Callable[[str], bool], location: str, usual: Fields
    ) -> dict[str, Any]:
        """The shared fields, from settings of `Names._settings`; `usual` has the defaults."""
        merged = {**usual, **{name: value for name, value in settings.items() if value is not None}}
        fields: dict[str, Any] = self._read_sizes(merged, location)
        if (activation := merged[self.activation]) not in self.activations:
            known = ", ".join(self.activations)
            raise ValueError(
                f"{location} has the {self.activation} {activation!r}; supported is {known}."
            )
        tied = merged["tie_word_embeddings"]
        return fields | {
            "head_dim": merged.get("head_dim") or fields["emb_dim"] // fields["num_heads"],
            "num_kv_heads": merged.get("num_key_value_heads", 0),
            "mlp_activations": (self.activations[activation], "linear"),
            "norm_epsilon": merged.get("rms_norm_eps", 1e-6),
            "logits_via_embedding": False if tied and own("lm_head.weight") else tied,
        }

    def stack(self, theirs: str, ours: str, depth: int, config: R) -> dict[str, Stored]:
        """The tensors of `depth` layers, and of the norm after them."""
        table = {f"{theirs}.norm.weight": Stored((f"{ours}/{ours}_norm/scale",))}
        for i in range(depth):
            there, here, made = f"{theirs}.layers.{i}", f"{ours}/layers_{i}", dict[str, Stored]()
            names = {name: f"{part}/scale" for name, part in self.norms.items()}
            for name, part in self.parts.items():
                made[f"{name}.weight"] = Stored((f"{part}/kernel",), True)
                if config.qkv_biases and part.rpartition("/")[2] in ("query", "key", "value"):
                    names[f"{name}.bias"] = f"{part}/bias"
            if config.head_norms:
                names |= {
                    f"self_attn.{x}_norm": f"self_attention/{y}_norm/scale" for x, y in _HEADS
                }
            for name, part in names.items():
                made[name if name.endswith("bias") else f"{name}.weight"] = Stored((part,))
            for name, ((part,), transposed) in made.items():
                # T5X has other names for an encoder's attention and its norm.
                part = part.replace("self_attention", "attention") if ours == "encoder" else part
                table[f"{there}.{name}"] = Stored((f"{here}/{part}",), transposed)
        return table

    def names(self, config: R) -> dict[str, Stored]:
        """See `Names.names`; those of a decoder-only model."""
        table = {"model.embed_tokens.weight": Stored(("token_embedder/embedding",))}
        table |= self.stack("model", "decoder", config.decoder_layers, config)
        if not config.logits_via_embedding:
            table["lm_head.weight"] = Stored(("decoder/logits_dense/kernel",), True)
        return table

    def written(self, config: R) -> dict[str, Any]:
        """The settings that every family's `config.json` has."""
        function = config.mlp_activations[0]
        theirs = next(name for name, ours in self.activations.items() if ours == function)
        return self._write_sizes(config) | {
            self.activation: theirs,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.norm_epsilon,
            "attention_bias": False,
            "tie_word_embeddings": config.logits_via_embedding,
        }


class StacksNames(RotaryNames[R]):
    """Names of encoder-decoders, whose `config.json` has a section per stack."""

    prefix = "model."
    activation = "hidden_activation"
    norms = {
        "pre_self_attn_layernorm": "pre_self_attention_layer_norm",
        "post_self_attn_layernorm": "post_self_attention_layer_norm",
        "pre_feedforward_layernorm": "pre_mlp_layer_norm",
        "post_feedforward_layernorm": "post_mlp_layer_norm",
    }
    usual: ClassVar[Fields]  # The defaults of a stack's section.

    def of_text(self, settings: Fields) -> tuple[Fields, str]:
        """See `Names.of_text`; special tokens and vocabulary size are the decoder's."""
        decoder = settings.get("decoder") or {}
        named = {name: x for name, x in decoder.items() if name.endswith("_token_id")}
        size = decoder.get("vocab_size", settings.get("vocab_size", self.usual["vocab_size"]))
        return {**named, **settings, "vocab_size": size}, ""

    def require_equal(
        self, encoder: Fields, decoder: Fields, but: Iterable[str], location: str
    ) -> None:
        """Raises ValueError unless both stacks have the same fields, `but` some."""
        for name in encoder.keys() - {*but}:
            if encoder[name] != decoder[name]:
                raise ValueError(
                    f"{location} has the {name} {encoder[name]!r} of the encoder and "
                    f"{decoder[name]!r} of the decoder; they must be equal."
                )

    def stacks(self, config: R) -> dict[str, Stored]:
        """The tensors of both stacks' layers and last norms."""
        depths = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        both = (self.stack(f"model.{x}", x, depth, config) for x, depth in depths.items())
        return {name: stored for table in both for name, stored in table.items()}

    def _write_sizes(self, config: R) -> dict[str, Any]:
        names = ((name, ours) for name, ours in self.sizes.items() if ours != "num_layers")
        return {name: getattr(config, ours) for name, ours in names}


_HEADS = ("q", "query"), ("k", "key")


def pattern(windows: list[int]) -> tuple[int, ...]:
    """The shortest beginning whose repetition gives all layers' windows."""
    sizes = range(1, len(windows) + 1)
    repeats = (n for n in sizes if all(w == windows[i % n] for i, w in enumerate(windows)))
    return tuple(windows[: next(repeats)])


def read_windows(settings: Fields, layers: int, usual: list[int], location: str) -> tuple[int, ...]:
    """The windows that a `config.json` gives its layers: in `layer_types`, or the usual ones."""
    if (types := settings.get("layer_types")) is None:
        return pattern(usual)
    size, named = settings.get("sliding_window"), {"full_attention": 0}
    if isinstance(size, int):
        named["sliding_attention"] = size
    if len(types) != layers or not {*types} <= named.keys():
        raise ValueError(
            f"{location} has {len(types)} layer_types, {', '.join(sorted({*types}))}, for {layers} "
            f"layers and a sliding_window {size!r}; known are {' and '.join(named)}, one per layer."
        )
    return pattern([named[kind] for kind in types])


def layer_types(config: RotaryConfig, layers: int) -> dict[str, Any]:
    """The `config.json` settings for windows."""
    names = [("sliding" if config.window(i) else "full") + "_attention" for i in range(layers)]
    return {"layer_types": names, "sliding_window": max(config.windows) or None}


def read_rope(
    settings: Fields, location: str, base: float = 10_000.0, layers: str | None = None
) -> Rope:
    """The rotary positions of a `config.json`, as any version of transformers writes them.

    `base` is the default; `layers` is the type of layers to read them for, where types differ.
    Raises ValueError for an unsupported kind.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = rope.get(layers) or {} if layers and {*rope} & {"full_attention", layers} else rope
    base = rope.get("rope_theta", settings.get("rope_theta", base))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1)) not in (1, None):
        raise ValueError(f"{location} rotates only part of each head's features, not all of them.")
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, rope["factor"])
    if kind == "llama3":
        names = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        return Rope(base, rope["factor"], tuple(float(rope[name]) for name in names))
    raise ValueError(
        f"{location} has rotary positions of the kind {kind!r}; supported are default, linear and "
        "llama3. Without its rope_scaling the model reads texts of its original length."
    )


def gemma_3_fields(settings: Fields, layers: int, location: str) -> dict[str, Any]:
    """The fields for Gemma 3's scores, rotations and windows: one layer in six sees all.

    Raises ValueError for a setting that transformers does not apply to its models.
    """
    if settings["attn_logit_softcapping"]:
        raise ValueError(f"{location} has attn_logit_softcapping, which only Gemma 2 has.")
    size, every = settings["sliding_window"], settings.get("sliding_window_pattern", 6)
    usual = [size if (i + 1) % every else 0 for i in range(layers)]
    local = {"rope_theta": settings.get("rope_local_base_freq", 10_000.0)}
    within = {"rope_parameters": settings.get("rope_parameters") or local}
    of_windows = read_rope(within, location, layers="sliding_attention")
    if of_windows != Rope(of_windows.base):
        raise ValueError(f"{location} scales the positions of layers with windows.")
    return {
        **score_fields(settings),
        **rope_fields(read_rope(settings, location, 1_000_000.0, "full_attention")),
        "windows": read_windows(settings, layers, usual, location),
        "window_rope_base": of_windows.base,
    }


def rope_fields(rope: Rope) -> dict[str, Any]:
    """The fields of a `RotaryConfig` for a rotation."""
    return {"rope_base": rope.base, "rope_factor": rope.factor, "rope_bounds": rope.bounds}


def score_fields(settings: Fields) -> dict[str, Any]:
    """The fields for the scale and caps of scores and logits in Gemma's settings."""
    return {
        "query_scalar": float(settings["query_pre_attn_scalar"]),
        "score_cap": settings["attn_logit_softcapping"] or 0.0,
        "logits_cap": settings["final_logit_softcapping"] or 0.0,
    }


def score_settings(config: RotaryConfig) -> dict[str, Any]:
    """Gemma's settings for the fields of `score_fields`."""
    scalar = config.query_scalar or config.head_dim
    return {
        # transformers requires a whole number.
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logits_cap or None,
    }


def rope_settings(rope: Rope) -> dict[str, Any]:
    """The `config.json` settings for a rotation, for any version of transformers."""
    if rope.bounds:
        low, high, positions = rope.bounds
        kind = {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
        kind |= {"factor": rope.factor, "original_max_position_embeddings": int(positions)}
    elif rope.factor != 1:
        kind = {"rope_type": "linear", "factor": rope.factor}
    else:
        kind = {"rope_type": "default"}
    return {"rope_theta": rope.base} | ({"rope_scaling": kind} if len(kind) > 1 else {})
