"""T5Gemma in transformers."""

import re
from collections.abc import Callable
from typing import Any

from speculative.models.names import Stored
from speculative.models.rotary_names import (
    GEMMA_2,
    StacksNames,
    layer_types,
    read_rope,
    read_windows,
    rope_fields,
    score_fields,
    score_settings,
)
from speculative.models.t5gemma.config import ENCODER, T5GemmaConfig
from speculative.types import Fields

_CROSS = {name: f"cross_attn.{name}_proj" for name in ("q", "k", "v", "o")}
_OURS = {"q": "query", "k": "key", "v": "value", "o": "out"}
LM_HEAD, EMBEDDING = "lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"


class T5GemmaNames(StacksNames[T5GemmaConfig]):
    """`T5GemmaForConditionalGeneration`, whose `config.json` has a section per stack."""

    title = "T5Gemma"
    model_types = {"t5gemma": 0}
    passed_over = re.compile(r"rotary_emb\.inv_freq|lm_head\.out_proj\.weight")
    tied = {LM_HEAD: EMBEDDING}
    usual = GEMMA_2

    def configuration(self, settings, own, location) -> T5GemmaConfig:
        """See `Names.configuration`; both stacks must share all settings but some sizes."""
        both = "encoder", "decoder"
        encoder, decoder = (self._of(settings, kind, own, location) for kind in both)
        self.require_equal(encoder, decoder, (*ENCODER, "num_layers"), location)
        depths = encoder.pop("num_layers"), decoder.pop("num_layers")
        differ = any(encoder[name] != decoder[name] for name in ENCODER)
        return T5GemmaConfig(
            **decoder,
            num_encoder_layers=depths[0],
            num_decoder_layers=depths[1],
            **{f"encoder_{name}": encoder[name] * differ for name in ENCODER},
        )

    def _of(
        self, settings: Fields, kind: str, own: Callable[[str], bool], location: str
    ) -> dict[str, Any]:
        merged = {**self.usual, **self._settings(settings.get(kind) or {}, location)}
        # This is a setting of the whole model.
        merged["tie_word_embeddings"] = settings.get("tie_word_embeddings", True)
        fields = self.fields(merged, lambda name: own(LM_HEAD), location, {})
        layers, size = fields["num_layers"], merged["sliding_window"]
        usual = [0 if i % 2 else size for i in range(layers)]
        return fields | {
            **score_fields(merged),
            **rope_fields(read_rope(merged, location)),
            "windows": read_windows(merged, layers, usual, location),
        }

    def names(self, config: T5GemmaConfig) -> dict[str, Stored]:
        """See `Names.names`."""
        table = {EMBEDDING: Stored(("token_embedder/embedding",))}
        table |= self.stacks(config)
        if config.encoder_layers:
            embedding = Stored(("encoder/token_embedder/embedding",))
            table |= {"model.encoder.embed_tokens.weight": embedding}
        for i in range(config.decoder_layers):
            theirs, ours = f"model.decoder.layers.{i}", f"decoder/layers_{i}"
            for name, part in _CROSS.items():
                kept = f"{ours}/encoder_decoder_attention/{_OURS[name]}/kernel"
                table[f"{theirs}.{part}.weight"] = Stored((kept,), True)
            for when in ("pre", "post"):
                kept = f"{ours}/{when}_cross_attention_layer_norm/scale"
                table[f"{theirs}.{when}_cross_attn_layernorm.weight"] = Stored((kept,))
        if not config.logits_via_embedding:
            table[LM_HEAD] = Stored(("decoder/logits_dense/kernel",), True)
        return table

    def settings(self, config: T5GemmaConfig, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        if config.rope(0).factor != 1:
            raise ValueError(f"transformers has no T5Gemma with the positions of {location}.")
        sizes = config.of_encoder, config
        depths = config.encoder_layers, config.decoder_layers
        stacks = {}
        for kind, one, layers in zip(("encoder", "decoder"), sizes, depths, strict=True):
            stacks[kind] = (
                self.written(one)
                | layer_types(config, layers)
                | {
                    "model_type": "t5_gemma_module",
                    "num_hidden_layers": layers,
                    "rope_theta": config.rope_base,
                    **score_settings(config),
                }
            )
        return {
            "architectures": ["T5GemmaForConditionalGeneration"],
            "model_type": "t5gemma",
            "is_encoder_decoder": True,
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": config.logits_via_embedding,
            **stacks,
        }
