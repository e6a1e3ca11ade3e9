"""T5 in transformers and in T5X."""

import re
from collections.abc import Mapping
from typing import Any

from speculative.models.names import SPIECE, Names, Stored
from speculative.models.t5.config import T5Config
from speculative.vocabulary import EXTRA_IDS


class T5Names(Names[T5Config]):
    """`T5ForConditionalGeneration`: v1.0, v1.1 and Flan; and T5X's own."""

    title = "T5"
    model_types = ("t5", "mt5")
    # Copies of the embedding, and a table that early exports held and no model reads.
    passed_over = re.compile(
        r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight"
        r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    )
    # Logits that are tied but not scaled.
    copies = {"lm_head.weight": "shared.weight"}
    vocabularies = (SPIECE,)
    extra_ids = EXTRA_IDS

    sizes = {
        "vocab_size": "vocab_size",
        "d_model": "emb_dim",
        "num_heads": "num_heads",
        "d_kv": "head_dim",
        "d_ff": "mlp_dim",
        "num_layers": "num_encoder_layers",
    }
    required = {"layer_norm_epsilon": (1e-6,)}
    optional = {
        "num_decoder_layers": "num_decoder_layers",
        "relative_attention_num_buckets": "num_buckets",
        "relative_attention_max_distance": "max_distance",
    }
    activations = {"relu": ("relu",), "gated-gelu": ("gelu", "linear")}
    parts = {
        "encoder": {"SelfAttention": "attention", "DenseReluDense": "mlp"},
        "decoder": {
            "SelfAttention": "self_attention",
            "EncDecAttention": "encoder_decoder_attention",
            "DenseReluDense": "mlp",
        },
    }

    def configuration(self, settings: Mapping[str, Any], location: str) -> T5Config:
        """Of T5 and mT5, with the layers of either version."""
        usual, tied = ("relu", True) if settings["model_type"] == "t5" else ("gated-gelu", False)
        kind = settings.get("feed_forward_proj", usual)
        if kind not in self.activations:
            known = ", ".join(self.activations)
            raise ValueError(f"{location} has the feed_forward_proj {kind!r}; known are {known}.")
        fields: dict[str, Any] = self._read_sizes(settings, location)
        fields["num_decoder_layers"] = fields["num_encoder_layers"]
        for name, ours in self.optional.items():
            if settings.get(name) is not None:
                fields[ours] = settings[name]
        # Recent versions say "tied" of every T5, and say by another name which are scaled.
        tied = settings.get("scale_decoder_outputs", settings.get("tie_word_embeddings", tied))
        fields["mlp_activations"] = self.activations[kind]
        return T5Config(**fields, logits_via_embedding=tied)

    def names(self, config: T5Config) -> dict[str, Stored]:
        """As of `Names`."""
        table: dict[str, Stored] = {}

        def store(theirs: str, ours: str, transposed: bool = False) -> None:
            table[f"{theirs}.weight"] = Stored((ours,), transposed)

        store("shared", "token_embedder/embedding")
        if not config.logits_via_embedding:
            store("lm_head", "decoder/logits_dense/kernel", True)
        mlp = ("wi_0", "wi_1", "wo") if config.gated else ("wi", "wo")
        attention = {"q": "query", "k": "key", "v": "value", "o": "out"}
        for stack, parts in self.parts.items():
            store(f"{stack}.final_layer_norm", f"{stack}/{stack}_norm/scale")
            buckets = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
            store(buckets, f"{stack}/relpos_bias/rel_embedding", True)
            for i in range(getattr(config, f"num_{stack}_layers")):
                for j, (theirs, part) in enumerate(parts.items()):
                    layer, ours = f"{stack}.block.{i}.layer.{j}", f"{stack}/layers_{i}"
                    norm = part.replace("encoder_decoder", "cross")
                    store(f"{layer}.layer_norm", f"{ours}/pre_{norm}_layer_norm/scale")
                    kernels = {name: name for name in mlp} if part == "mlp" else attention
                    for name, kernel in kernels.items():
                        store(f"{layer}.{theirs}.{name}", f"{ours}/{part}/{kernel}/kernel", True)
        return table

    def settings(self, config: T5Config, location: str) -> dict[str, Any]:
        """As of `Names`."""
        if config.source_dim:
            raise ValueError(f"transformers knows no T5 without an encoder, as {location} is.")
        return self._write_sizes(config) | {
            **{name: getattr(config, ours) for name, ours in self.optional.items()},
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "dropout_rate": config.dropout_rate,
            "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": "gated-gelu" if config.gated else "relu",
            "tie_word_embeddings": config.logits_via_embedding,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        }

    def infer(self, shapes: Mapping[str, tuple[int, ...]], location: str) -> T5Config:
        """As of `Names`; no shape shows `max_distance`, which is T5's 128."""

        def shape(name: str) -> tuple[int, ...]:
            if name in shapes:
                return shapes[name]
            raise ValueError(f"{location} holds no T5 encoder-decoder: it lacks the tensor {name}.")

        def layers(stack: str) -> int:
            return len({n.split("/")[1] for n in shapes if n.startswith(f"{stack}/layers_")})

        vocab_size, emb_dim = shape("token_embedder/embedding")
        heads, buckets = shape("decoder/relpos_bias/rel_embedding")
        width = shape("decoder/layers_0/self_attention/query/kernel")[1]
        if width % heads:
            raise ValueError(f"The queries of {location} have {width} features for {heads} heads.")
        gated = "decoder/layers_0/mlp/wi_0/kernel" in shapes
        mlp_dim = shape(f"decoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel")[1]
        return T5Config(
            vocab_size, emb_dim, heads, width // heads, mlp_dim,
            layers("encoder"), layers("decoder"),
            mlp_activations=self.activations["gated-gelu" if gated else "relu"],
            logits_via_embedding="decoder/logits_dense/kernel" not in shapes,
            num_buckets=buckets,
        )  # fmt: skip

    def require_t5x(self, config: T5Config, location: str) -> None:
        """T5X's own models, all with an encoder."""
        if config.source_dim:
            raise ValueError(f"T5X knows no model without an encoder, as {location} is.")
