"""GPT-2 in transformers."""

import re
from typing import Any

from speculative.models.gpt.config import GPT, DecoderOnlyConfig
from speculative.models.names import SPIECE, Names, Stored
from speculative.vocabulary import PAIRS, TOKENIZER


class GPTNames(Names[DecoderOnlyConfig]):
    """`GPT2LMHeadModel`, whose kernels are [in, out] as ours are."""

    title = "GPT-2"
    model_types = {"gpt2": 0}
    prefix = "transformer."
    # The causal mask and positions, which early versions kept as buffers of any type, and a copy of
    # the embedding.
    passed_over = re.compile(r"h\.\d+\.attn\.(masked_)?bias|position_ids|lm_head\.weight")
    tied = {"lm_head.weight": "transformer.wte.weight"}
    vocabularies = (TOKENIZER, PAIRS, SPIECE)

    sizes = {
        "vocab_size": "vocab_size",
        "n_positions": "max_positions",
        "n_embd": "emb_dim",
        "n_layer": "num_layers",
        "n_head": "num_heads",
    }
    aliases = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    required = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    parts = {
        "ln_1": ("pre_self_attention_layer_norm",),
        "attn.c_attn": ("self_attention/query", "self_attention/key", "self_attention/value"),
        "attn.c_proj": ("self_attention/out",),
        "ln_2": ("pre_mlp_layer_norm",),
        "mlp.c_fc": ("mlp/wi",),
        "mlp.c_proj": ("mlp/wo",),
    }

    def configuration(self, settings, own, location) -> DecoderOnlyConfig:
        """See `Names.configuration`; variants of GPT-2 are not supported."""
        settings = self._settings(settings, location)
        fields: dict[str, Any] = self._read_sizes(settings, location)
        emb_dim, heads = fields["emb_dim"], fields["num_heads"]
        if emb_dim % heads:
            raise ValueError(f"{location} has an n_embd of {emb_dim} for an n_head of {heads}.")
        inner, tied = settings.get("n_inner"), settings.get("tie_word_embeddings", True)
        return DecoderOnlyConfig(
            **fields,
            head_dim=emb_dim // heads,
            mlp_dim=4 * emb_dim if inner is None else inner,
            logits_via_embedding=False if tied is True and own("lm_head.weight") else tied,
        )

    def names(self, config: DecoderOnlyConfig) -> dict[str, Stored]:
        """See `Names.names`."""
        table = {
            "transformer.wte.weight": Stored(("token_embedder/embedding",)),
            "transformer.wpe.weight": Stored(("decoder/position_embedder/embedding",)),
        }
        modules: dict[str, tuple[str, ...]] = {"ln_f": ("decoder_norm",)}
        for i in range(config.num_layers):
            for theirs, ours in self.parts.items():
                modules[f"h.{i}.{theirs}"] = tuple(f"layers_{i}/{part}" for part in ours)
        for theirs, ours in modules.items():
            weight = "scale" if ours[0].endswith("norm") else "kernel"
            for name, kind in (("weight", weight), ("bias", "bias")):
                parts = tuple(f"decoder/{part}/{kind}" for part in ours)
                table[f"transformer.{theirs}.{name}"] = Stored(parts)
        if not config.logits_via_embedding:
            table["lm_head.weight"] = Stored(("decoder/logits_dense/kernel",), True)
        return table

    def settings(self, config: DecoderOnlyConfig, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        if not config.max_positions:
            raise ValueError(
                f"transformers has no decoder-only model with a T5's layers, as {location} is."
            )
        for field, value in GPT.items():
            if (ours := getattr(config, field)) != value:
                raise ValueError(f"{location} has {field} = {ours!r} where GPT-2 has {value!r}.")
        if config.num_heads * config.head_dim != config.emb_dim:
            raise ValueError(
                f"The heads of transformers' GPT-2 share its {config.emb_dim} features, but "
                f"{location} has {config.num_heads} of {config.head_dim}."
            )
        return self._write_sizes(config) | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_inner": config.mlp_dim,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout_rate),
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": config.logits_via_embedding,
        }
