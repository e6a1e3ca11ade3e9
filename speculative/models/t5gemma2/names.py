"""T5Gemma 2 in transformers."""

import re
from collections.abc import Callable
from typing import Any

from speculative.models.names import Stored
from speculative.models.rotary_names import (
    GEMMA_3,
    T5GEMMA_NORMS,
    RotaryNames,
    gemma_3_positions,
    layer_types,
    rope_settings,
    score_fields,
    score_settings,
)
from speculative.models.t5gemma2.config import T5Gemma2Config
from speculative.types import Fields

EMBEDDING = "model.encoder.embed_tokens.weight"
COPIES = "model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"


class T5Gemma2Names(RotaryNames[T5Gemma2Config]):
    """The text model of `T5Gemma2ForConditionalGeneration`; the vision tower is left out.

    So is the embedding of the token that ends an image.
    """

    title = "T5Gemma 2"
    model_types = {"t5gemma2": 0}
    prefix = "model."
    passed_over = re.compile(r".*rotary_emb\.\w+|decoder\.embed_tokens\.weight|lm_head\..*")
    of_images = re.compile(
        r"encoder\.(vision_tower|multi_modal_projector)\..*|.*\.embed_tokens\.eoi_embedding"
    )
    tied = dict.fromkeys(COPIES, EMBEDDING)
    activation = "hidden_activation"
    norms = T5GEMMA_NORMS
    required = {**RotaryNames.required, "tie_word_embeddings": (True,)}

    def of_text(self, settings: Fields) -> tuple[Fields, str]:
        """See `Names.of_text`; special tokens and vocabulary size are the decoder's."""
        decoder = settings.get("decoder") or {}
        named = {name: x for name, x in decoder.items() if name.endswith("_token_id")}
        size = decoder.get("vocab_size", settings.get("vocab_size", GEMMA_3["vocab_size"]))
        return {**named, **settings, "vocab_size": size}, ""

    def configuration(self, settings, own, location) -> T5Gemma2Config:
        """See `Names.configuration`; both stacks must have all settings but the depth in common."""
        of_encoder = (settings.get("encoder") or {}).get("text_config") or {}
        both = of_encoder, settings.get("decoder") or {}
        encoder, decoder = (self._of(stack, own, location) for stack in both)
        for name in encoder.keys() - {"num_layers"}:
            if encoder[name] != decoder[name]:
                raise ValueError(
                    f"{location} has the {name} {encoder[name]!r} of the encoder and "
                    f"{decoder[name]!r} of the decoder; they must be equal."
                )
        depths = encoder.pop("num_layers"), decoder.pop("num_layers")
        return T5Gemma2Config(**decoder, num_encoder_layers=depths[0], num_decoder_layers=depths[1])

    def _of(self, stack: Fields, own: Callable[[str], bool], location: str) -> dict[str, Any]:
        merged = {**GEMMA_3, **self._settings(stack, location)}
        if any(own(name) for name in COPIES):
            raise ValueError(f"{location} has several embeddings; T5Gemma 2 has one.")
        fields = self.fields(merged, lambda name: False, location, {})
        positions = gemma_3_positions(merged, fields["num_layers"], location)
        return fields | {**score_fields(merged), **positions}

    def names(self, config: T5Gemma2Config) -> dict[str, Stored]:
        """See `Names.names`."""
        table = {EMBEDDING: Stored(("token_embedder/embedding",))}
        of_encoder = self.stack("model.encoder", "encoder", config.encoder_layers, config)
        for name, (parts, transposed) in of_encoder.items():
            # Here, an encoder's attention and its norm have other names.
            ours = tuple(part.replace("self_attention", "attention") for part in parts)
            table[name] = Stored(ours, transposed)
        return table | self.stack("model.decoder", "decoder", config.decoder_layers, config)

    def settings(self, config: T5Gemma2Config, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        full = config.windows.index(0) if 0 in config.windows else 0
        if config.reads.source_dim or not config.logits_via_embedding:
            raise ValueError(f"transformers has no T5Gemma 2 of the kind of {location}.")
        stacks = []
        for kind, layers in ("text", config.encoder_layers), ("decoder", config.decoder_layers):
            of_rope = rope_settings(config.rope(full))
            of_rope["rope_local_base_freq"] = config.window_rope_base
            depth = {"model_type": f"t5gemma2_{kind}", "num_hidden_layers": layers}
            stacks.append(
                self.written(config)
                | layer_types(config, layers)
                | of_rope
                | depth
                | score_settings(config)
            )
        return {
            "architectures": ["T5Gemma2ForConditionalGeneration"],
            "model_type": "t5gemma2",
            "is_encoder_decoder": True,
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": True,
            "encoder": {"model_type": "t5gemma2_encoder", "text_config": stacks[0]},
            "decoder": stacks[1],
        }

    def _write_sizes(self, config: T5Gemma2Config) -> dict[str, Any]:
        names = ((name, ours) for name, ours in self.sizes.items() if ours != "num_layers")
        return {name: getattr(config, ours) for name, ours in names}
