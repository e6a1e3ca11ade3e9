"""T5 in transformers and in T5X."""

import re
from collections.abc import Mapping
from typing import Any

from speculative.models.names import SPIECE, Names, Stored
from speculative.models.t5.config import SIZES, T5Config
from speculative.vocabulary import EXTRA_IDS, TOKENIZER


class T5Names(Names[T5Config]):
    """`T5ForConditionalGeneration`, those of mT5 and umT5, and T5X's own models."""

    title = "T5, Flan-T5, UL2, ByT5, mT5 and umT5"
    # The pieces of mT5's vocabulary end with its 100 sentinels.
    model_types = {"t5": EXTRA_IDS, "mt5": 0, "umt5": 300}
    # Copies of the embedding, and a table that early exports held and no model reads.
    passed_over = re.compile(
        r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight"
        r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    )
    tied = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }
    filled = ("lm_head.weight",)  # Logits that are tied but not scaled.
    vocabularies = (SPIECE, TOKENIZER)

    sizes = {
        "vocab_size": "vocab_size",
        "d_model": "emb_dim",
        "num_heads": "num_heads",
        "d_kv": "head_dim",
        "d_ff": "mlp_dim",
        "num_layers": "num_encoder_layers",
    }
    aliases = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    required = {"layer_norm_epsilon": (1e-6,)}
    optional = {
        "num_decoder_layers": "num_decoder_layers",
        "relative_attention_num_buckets": "num_buckets",
        "relative_attention_max_distance": "max_distance",
    }
    projections = {
        ("relu",): "relu",
        ("gelu", "linear"): "gated-gelu",
        ("silu", "linear"): "gated-silu",
    }
    parts = {
        "encoder": {"SelfAttention": "attention", "DenseReluDense": "mlp"},
        "decoder": {
            "SelfAttention": "self_attention",
            "EncDecAttention": "encoder_decoder_attention",
            "DenseReluDense": "mlp",
        },
    }

    def configuration(self, settings, own, location) -> T5Config:
        """See `Names.configuration`; T5, mT5 and umT5 may have the layers of any version."""
        settings, family = self._settings(settings, location), settings["model_type"]
        if own("encoder.embed_tokens.weight"):
            raise ValueError(
                f"The encoder.embed_tokens.weight next to {location} is not its shared.weight; "
                "only the decoder may have an embedding of its own."
            )
        fields: dict[str, Any] = self._read_sizes(settings, location)
        fields["num_decoder_layers"] = fields["num_encoder_layers"]
        present = {name for name in self.optional if settings.get(name) is not None}
        fields |= {self.optional[name]: settings[name] for name in present}
        # Recent versions call all of them tied. For T5, another setting says whether logits are
        # scaled, as tied ones are; mT5's never are, and umT5's are if a setting says so.
        tied = settings.get("tie_word_embeddings", True)
        tied = settings.get("scale_decoder_outputs", tied) if family != "mt5" else False
        if tied is True and own("lm_head.weight"):
            raise ValueError(
                f"{location} says that logits are tied to the embedding and so scaled, but there "
                "is an lm_head.weight of their own, as in a umT5 saved by transformers 5; set "
                '"tie_word_embeddings": false to read it unscaled, as in Google\'s own.'
            )
        fields["mlp_activations"] = self._activations(settings, location)
        fields["shared_embedding"] = not own("decoder.embed_tokens.weight")
        return T5Config(**fields, shared_positions=family != "umt5", logits_via_embedding=tied)

    def _activations(self, settings: Mapping[str, Any], location: str) -> tuple[str, ...]:
        """The feed-forward activations; as in transformers, explicit settings take precedence.

        These are `dense_act_fn` and `is_gated_act`; by default `feed_forward_proj` gives both.
        """
        usual = "relu" if settings["model_type"] == "t5" else "gated-gelu"
        kind = settings.get("feed_forward_proj", usual)
        gate, _, function = kind.rpartition("-")
        function = "gelu_new" if kind == "gated-gelu" else function
        setting = "feed_forward_proj"
        if settings.get("dense_act_fn", function) != function:
            setting, function = "dense_act_fn", settings["dense_act_fn"]
        if gate not in ("", "gated") or function not in self.activations:
            known = (
                [*self.projections.values()] if setting == "feed_forward_proj" else self.activations
            )
            raise ValueError(
                f"{location} has the {setting} {settings[setting]!r}; known are {', '.join(known)}."
            )
        gated = settings.get("is_gated_act", gate == "gated")
        return (self.activations[function], "linear")[: 2 if gated else 1]

    def names(self, config: T5Config) -> dict[str, Stored]:
        """See `Names.names`."""
        table: dict[str, Stored] = {}

        def store(theirs: str, ours: str, transposed: bool = False) -> None:
            table[f"{theirs}.weight"] = Stored((ours,), transposed)

        store("shared", "token_embedder/embedding")
        if not config.shared_embedding:
            store("decoder.embed_tokens", "decoder/token_embedder/embedding")
        if not config.logits_via_embedding:
            store("lm_head", "decoder/logits_dense/kernel", True)
        mlp = ("wi_0", "wi_1", "wo") if config.gated else ("wi", "wo")
        attention = {"q": "query", "k": "key", "v": "value", "o": "out"}
        for stack, parts in self.parts.items():
            store(f"{stack}.final_layer_norm", f"{stack}/{stack}_norm/scale")
            for i in range(getattr(config, f"num_{stack}_layers")):
                buckets = f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias"
                if not config.shared_positions:
                    store(buckets, f"{stack}/layers_{i}/relative_posemb/rel_embedding", True)
                elif i == 0:
                    store(buckets, f"{stack}/relpos_bias/rel_embedding", True)
                for j, (theirs, part) in enumerate(parts.items()):
                    layer, ours = f"{stack}.block.{i}.layer.{j}", f"{stack}/layers_{i}"
                    norm = part.replace("encoder_decoder", "cross")
                    store(f"{layer}.layer_norm", f"{ours}/pre_{norm}_layer_norm/scale")
                    kernels = {name: name for name in mlp} if part == "mlp" else attention
                    for name, kernel in kernels.items():
                        store(f"{layer}.{theirs}.{name}", f"{ours}/{part}/{kernel}/kernel", True)
        return table

    def settings(self, config: T5Config, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        if config.reads.source_dim:
            raise ValueError(f"transformers knows no T5 without an encoder, as {location} is.")
        if (kind := self.projections.get(config.mlp_activations)) is None:
            raise ValueError(
                f"{location} has the mlp_activations {config.mlp_activations}, which transformers "
                f"has no name for; it has one for {', '.join(map(str, self.projections))}."
            )
        family = "T5" if config.shared_positions else "UMT5"
        return self._write_sizes(config) | {
            **{name: getattr(config, ours) for name, ours in self.optional.items()},
            "architectures": [f"{family}ForConditionalGeneration"],
            "model_type": family.lower(),
            "is_encoder_decoder": True,
            "dropout_rate": config.dropout_rate,
            "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": kind,
            "tie_word_embeddings": config.logits_via_embedding,
        }

    def infer(self, shapes: Mapping[str, tuple[int, ...]], location: str) -> T5Config:
        """See `Names.infer`.

        Shapes show neither `max_distance`, taken as T5's 128, nor the gate's function, taken as a
        GELU except in a model of UL2's sizes.
        """

        def shape(name: str) -> tuple[int, ...]:
            if name in shapes:
                return shapes[name]
            raise ValueError(f"{location} holds no T5 encoder-decoder: it lacks the tensor {name}.")

        def layers(stack: str) -> int:
            return len({n.split("/")[1] for n in shapes if n.startswith(f"{stack}/layers_")})

        vocab_size, emb_dim = shape("token_embedder/embedding")
        shared = "decoder/layers_0/relative_posemb/rel_embedding" not in shapes
        positions = "relpos_bias" if shared else "layers_0/relative_posemb"
        heads, buckets = shape(f"decoder/{positions}/rel_embedding")
        width = shape("decoder/layers_0/self_attention/query/kernel")[1]
        if width % heads:
            raise ValueError(f"The queries of {location} have {width} features for {heads} heads.")
        gated = "decoder/layers_0/mlp/wi_0/kernel" in shapes
        mlp_dim = shape(f"decoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel")[1]
        config = T5Config(
            vocab_size, emb_dim, heads, width // heads, mlp_dim,
            layers("encoder"), layers("decoder"),
            mlp_activations=("gelu", "linear") if gated else ("relu",),
            logits_via_embedding="decoder/logits_dense/kernel" not in shapes,
            shared_positions=shared,
            num_buckets=buckets,
        )  # fmt: skip
        return self._assumed(config)

    def _assumed(self, config: T5Config) -> T5Config:
        """The configuration with the values that `infer` assumes where shapes show none."""
        usual = config.replace(
            mlp_activations=("gelu", "linear") if config.gated else ("relu",),
            max_distance=T5Config.max_distance,
        )
        ul2 = SIZES["ul2"].replace(dtype=config.dtype, dropout_rate=config.dropout_rate)
        return ul2 if usual.replace(mlp_activations=ul2.mlp_activations) == ul2 else usual

    def require_t5x(self, config: T5Config, location: str) -> None:
        """See `Names.require_t5x`; T5X's own models all have an encoder."""
        if config.reads.source_dim:
            raise ValueError(f"T5X knows no model without an encoder, as {location} is.")
        if not config.shared_embedding:
            raise ValueError(
                f"T5X knows no decoder with an embedding of its own, as {location} has; write "
                "another format (--to native, huggingface)."
            )
        assumed = self._assumed(config)
        for field in ("mlp_activations", "max_distance"):
            if (value := getattr(config, field)) != (read := getattr(assumed, field)):
                raise ValueError(
                    f"{location} has {field} = {value!r}, which T5X's format does not hold: it "
                    f"would be read as {read!r}; write another format (--to native, huggingface)."
                )
