"""T5Gemma 2 in transformers."""

import re
from typing import Any

from speculative.models.names import Stored
from speculative.models.rope import Rope
from speculative.models.rotary_names import (
    GEMMA_3,
    StacksNames,
    gemma_3_fields,
    layer_types,
    rope_settings,
    score_settings,
)
from speculative.models.t5gemma2.config import T5Gemma2Config
from speculative.types import Fields

EMBEDDING = "model.encoder.embed_tokens.weight"
COPIES = "model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"


class T5Gemma2Names(StacksNames[T5Gemma2Config]):
    """The text model of `T5Gemma2ForConditionalGeneration`; the vision tower is left out.

    So is the embedding of the token that ends an image.
    """

    title = "T5Gemma 2"
    model_types = {"t5gemma2": 0}
    passed_over = re.compile(
        r".*rotary_emb\.\w+|decoder\.embed_tokens\.weight|lm_head\.out_proj\.weight"
    )
    of_images = re.compile(
        r"model\.encoder\.(vision_tower|multi_modal_projector)\..*|.*\.embed_tokens\.eoi_embedding"
    )
    tied = dict.fromkeys(COPIES, EMBEDDING)
    usual = GEMMA_3
    required = {**StacksNames.required, "use_bidirectional_attention": (False, None)}

    def configuration(self, settings, own, location) -> T5Gemma2Config:
        """See `Names.configuration`; both stacks must have all settings but the depth in common."""
        if not settings.get("tie_word_embeddings", True) or any(own(name) for name in COPIES):
            raise ValueError(f"{location} has several embeddings; T5Gemma 2 has one.")
        of_encoder = (settings.get("encoder") or {}).get("text_config") or {}
        both = of_encoder, settings.get("decoder") or {}
        encoder, decoder = (self._of(stack, location) for stack in both)
        depths = encoder.pop("num_layers"), decoder.pop("num_layers")
        # A stack may be shallower than the cycle of windows.
        deeper, other = (encoder, decoder) if depths[0] > depths[1] else (decoder, encoder)
        of_layers = [(stack["windows"] * min(depths))[: min(depths)] for stack in (deeper, other)]
        if of_layers[0] == of_layers[1]:
            other["windows"] = deeper["windows"]
        self.require_equal(encoder, decoder, (), location)
        return T5Gemma2Config(**decoder, num_encoder_layers=depths[0], num_decoder_layers=depths[1])

    def _of(self, stack: Fields, location: str) -> dict[str, Any]:
        merged = {**self.usual, **self._settings(stack, location), "tie_word_embeddings": True}
        fields = self.fields(merged, lambda name: False, location, {})
        return fields | gemma_3_fields(merged, fields["num_layers"], location)

    def names(self, config: T5Gemma2Config) -> dict[str, Stored]:
        """See `Names.names`."""
        return {EMBEDDING: Stored(("token_embedder/embedding",))} | self.stacks(config)

    def settings(self, config: T5Gemma2Config, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        full = config.windows.index(0) if 0 in config.windows else 0
        others = config.rope(full) != Rope(config.rope_base) and not config.window_rope_base
        if config.reads.source_dim or not config.logits_via_embedding or others:
            raise ValueError(f"transformers has no T5Gemma 2 of the kind of {location}.")
        both = self.written(config) | rope_settings(config.rope(full)) | score_settings(config)
        both["rope_local_base_freq"] = config.window_rope_base or config.rope_base
        stacks = [
            {
                **both,
                **layer_types(config, layers),
                "model_type": f"t5gemma2_{kind}",
                "num_hidden_layers": layers,
            }
            for kind, layers in (
                ("text", config.encoder_layers),
                ("decoder", config.decoder_layers),
            )
        ]
        return {
            "architectures": ["T5Gemma2ForConditionalGeneration"],
            "model_type": "t5gemma2",
            "is_encoder_decoder": True,
            "vocab_size": config.vocab_size,
            "tie_word_embeddings": True,
            "encoder": {"model_type": "t5gemma2_encoder", "text_config": stacks[0]},
            "decoder": stacks[1],
        }
