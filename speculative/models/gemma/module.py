"""Gemma: the Flax module, and the model over it."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from speculative.backends import Norm
from speculative.models.decoder_only import Decoder, DecoderOnly
from speculative.models.gemma.config import GemmaConfig
from speculative.types import Logits, Tokens


class GemmaDecoder(Decoder):
    """Embedding, scaled by the root of D, and stack; the root of the parameter tree."""

    config: GemmaConfig

    def embedded(self, table: nn.Embed, tokens: Tokens) -> Array:
        """As of `Transformer`, scaled."""
        x = super().embedded(table, tokens)
        # The scale is rounded to the products' type, as in the models' training.
        return x * jnp.asarray(self.config.emb_dim**0.5, x.dtype)

    def logits(self, x: Array, norm: Norm | None = None) -> Logits:
        """As of `Transformer`, under their soft cap."""
        logits, cap = super().logits(x, norm), self.config.logits_cap
        return cap * jnp.tanh(logits / cap) if cap else logits


@dataclasses.dataclass(frozen=True)
class Gemma(DecoderOnly):
    """A Gemma of a given configuration, as pure functions on explicit parameters."""

    config: GemmaConfig
    root = GemmaDecoder
