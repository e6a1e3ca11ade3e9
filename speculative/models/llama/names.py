"""Llama, Mistral, Qwen2 and Qwen3 in transformers."""

import re

from speculative.models.llama.config import LlamaConfig
from speculative.models.rotary_names import (
    RotaryNames,
    layer_types,
    read_rope,
    read_windows,
    rope_fields,
    rope_settings,
)
from speculative.types import Fields

# Defaults of a `config.json`, and those that only Qwen3 or Mistral has.
_USUAL: Fields = {"hidden_act": "silu", "tie_word_embeddings": False}
_OF = {"qwen3": {"head_dim": 128}, "mistral": {"num_key_value_heads": 8}}


class LlamaNames(RotaryNames[LlamaConfig]):
    """`LlamaForCausalLM` and similar models."""

    title = "Llama"
    model_types = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), 0)
    prefix = "model."
    # Frequencies, which early versions kept as buffers, and a copy of the embedding.
    passed_over = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight")
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    required = {**RotaryNames.required, "mlp_bias": (False,)}
    norms = {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "pre_mlp_layer_norm",
    }

    def configuration(self, settings, own, location) -> LlamaConfig:
        """See `Names.configuration`; the `model_type` tells the kind."""
        settings = self._settings(settings, location)
        kind = settings["model_type"]
        return LlamaConfig(
            **self.fields(settings, own, location, {**_USUAL, **_OF.get(kind, {})}),
            **rope_fields(read_rope(settings, location)),
            windows=self._windows(settings, location),
            qkv_biases=kind == "qwen2",
            head_norms=kind == "qwen3",
        )

    def _windows(self, settings: Fields, location: str) -> tuple[int, ...]:
        """Windows: in Mistral on all layers; in Qwen, if enabled, from `max_window_layers` on."""
        kind, layers = settings["model_type"], settings["num_hidden_layers"]
        size, first = settings.get("sliding_window", 4096), 0
        if kind.startswith("qwen") and settings.get("use_sliding_window"):
            first = min(settings.get("max_window_layers", 28), layers)
        elif kind != "mistral":
            size = None
        usual = [0] * first + [size or 0] * (layers - first)
        return read_windows(settings, layers, usual, location) if size else (0,)

    def settings(self, config: LlamaConfig, location: str) -> dict[str, object]:
        """See `Names.settings`; biases, norms and windows tell the kind."""
        windowed = any(config.windows)
        kind = "qwen3" if config.head_norms else "qwen2" if config.qkv_biases else "llama"
        if kind == "llama" and windowed:
            kind = "mistral"
        some = kind == "mistral" and not all(config.windows)
        if config.head_norms and config.qkv_biases or some or config.logits != config.vocab_size:
            raise ValueError(
                f"transformers has no {config.description()[0]} with the windows, norms and biases "
                f"of {location}."
            )
        of_windows = layer_types(config, config.num_layers) if windowed else {}
        if kind.startswith("qwen"):
            of_windows |= {"use_sliding_window": windowed}
        elif kind == "mistral":
            del of_windows["layer_types"]
        title = {"llama": "Llama", "mistral": "Mistral"}.get(kind, kind.capitalize())
        settings = self.written(config) | rope_settings(config.rope(0)) | of_windows
        return settings | {"architectures": [f"{title}ForCausalLM"], "model_type": kind}
