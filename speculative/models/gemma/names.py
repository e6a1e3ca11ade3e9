"""Gemma 2 and 3 in transformers."""

import re

from speculative.models.gemma.config import GemmaConfig
from speculative.models.rotary_names import (
    GEMMA_2,
    GEMMA_3,
    RotaryNames,
    gemma_3_fields,
    layer_types,
    read_rope,
    read_windows,
    rope_fields,
    rope_settings,
    score_fields,
    score_settings,
)
from speculative.types import Fields


class GemmaNames(RotaryNames[GemmaConfig]):
    """`Gemma2ForCausalLM`, `Gemma3ForCausalLM`, and the text model of the multimodal Gemma 3."""

    title = "Gemma"
    model_types = dict.fromkeys(("gemma2", "gemma3_text", "gemma3"), 0)
    prefix = "model."
    passed_over = re.compile(r"rotary_emb\.inv_freq|lm_head\.weight")
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    required = {**RotaryNames.required, "use_bidirectional_attention": (False, None)}
    activation = "hidden_activation"
    norms = {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
        "pre_feedforward_layernorm": "pre_mlp_layer_norm",
        "post_feedforward_layernorm": "post_mlp_layer_norm",
    }

    def of_text(self, settings: Fields) -> tuple[Fields, str]:
        """See `Names.of_text`; a multimodal Gemma 3 sets its text model's special tokens."""
        if settings["model_type"] != "gemma3":
            return settings, ""
        named = {name: value for name, value in settings.items() if name.endswith("_token_id")}
        text = {**GEMMA_3, **named, **settings["text_config"], "model_type": "gemma3_text"}
        return text, "language_model"

    def configuration(self, settings, own, location) -> GemmaConfig:
        """See `Names.configuration`; defaults differ by `model_type`."""
        third = settings["model_type"] != "gemma2"
        merged = {**(GEMMA_3 if third else GEMMA_2), **self._settings(settings, location)}
        fields = self.fields(merged, own, location, {})
        layers = fields["num_layers"]
        if third:
            return GemmaConfig(
                **fields, head_norms=True, **gemma_3_fields(merged, layers, location)
            )
        usual = [0 if i % 2 else merged["sliding_window"] for i in range(layers)]
        return GemmaConfig(
            **fields,
            **score_fields(merged),
            **rope_fields(read_rope(merged, location)),
            windows=read_windows(merged, layers, usual, location),
        )

    def settings(self, config: GemmaConfig, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        third, full = config.head_norms, config.windows.index(0) if 0 in config.windows else 0
        if (full == 0 and any(config.windows)) or bool(config.window_rope_base) != third:
            raise ValueError(
                f"transformers has no {config.description()[0]} with the windows of {location}."
            )
        settings = self.written(config) | rope_settings(config.rope(full))
        settings |= layer_types(config, config.num_layers)
        kind = "gemma3_text" if third else "gemma2"
        if third:
            settings["rope_local_base_freq"] = config.window_rope_base
        return settings | {
            "architectures": [f"Gemma{3 if third else 2}ForCausalLM"],
            "model_type": kind,
            **score_settings(config),
        }
