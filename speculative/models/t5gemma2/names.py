"""T5Gemma 2 in transformers."""

import re
from collections.abc import Callable
from typing import Any

from speculative.models.names import Stored
from speculative.models.rotary_names import (
    GEMMA_3,
    StacksNames,
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


class T5Gemma2Names(StacksNames[T5Gemma2Config]):
    """The text model of `T5Gemma2ForConditionalGeneration`; the vision tower is left out.

    So is the embedding of the token that ends an image.
    """

    title = "T5Gemma 2"
    model_types = {"t5gemma2": 0}
    passed_over = re.compile(r".*rotary_emb\.\w+|decoder\.embed_tokens\.weight|lm_head\..*")
    of_images = re.compile(
        r"encoder\.(vision_tower|multi_modal_projector)\..*|.*\.embed_tokens\.eoi_embedding"
    )
    tied = dict.fromkeys(COPIES, EMBEDDING)
    usual = GEMMA_3
    required = {**StacksNames.required, "tie_word_embeddings": (True,)}

    def configuration(self, settings, own, location) -> T5Gemma2Config:
        """See `Names.configuration`; both stacks must have all settings but the depth in common."""
        of_encoder = (settings.get("encoder") or {}).get("text_config") or {}
        both = of_encoder, settings.get("decoder") or {}
        encoder, decoder = (self._of(stack, own, location) for stack in both)
        self.require_equal(encoder, decoder, ("num_layers",), location)
        depths = encoder.pop("num_layers"), decoder.pop("num_layers")
        return T5Gemma2Config(**decoder, num_encoder_layers=depths[0], num_decoder_layers=depths[1])

    def _of(self, stack: Fields, own: Callable[[str], bool], location: str) -> dict[str, Any]:
        merged = {**self.usual, **self._settings(stack, location)}
        if any(own(name) for name in COPIES):
            raise ValueError(f"{location} has several embeddings; T5Gemma 2 has one.")
        fields = self.fields(merged, lambda name: False, location, {})
        positions = gemma_3_positions(merged, fields["num_layers"], location)
        return fields | {**score_fields(merged), **positions}

    def names(self, config: T5Gemma2Config) -> dict[str, Stored]:
        """See `Names.names`."""
        return {EMBEDDING: Stored(("token_embedder/embedding",))} | self.stacks(config)

    def settings(self, config: T5Gemma2Config, location: str) -> dict[str, object]:
        """See `Names.settings`."""
        full = config.windows.index(0) if 0 in config.windows else 0
        if config.reads.source_dim or not config.logits_via_embedding:
            raise ValueError(f"transformers has no T5Gemma 2 of the kind of {location}.")
        both = self.written(config) | rope_settings(config.rope(full)) | score_settings(config)
        both["rope_local_base_freq"] = config.window_rope_base
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
