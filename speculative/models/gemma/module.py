"""Gemma: the Flax module, and the model over it."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from speculative.models.decoder_only import Decoder, DecoderOnly
from speculative.models.gemma.config import GemmaConfig
from speculative.types import Tokens


class GemmaDecoder(Decoder):
    """Embedding, scaled by the square root of D, and stack; the root of the parameter tree."""

    def embedded(self, table: nn.Embed, tokens: Tokens) -> Array:
        """See `Transformer.embedded`; the result is scaled."""
        x = super().embedded(table, tokens)
        # The scale is rounded to the products' type, as in the models' training.
        return x * jnp.asarray(self.config.emb_dim**0.5, x.dtype)


@dataclasses.dataclass(frozen=True)
class Gemma(DecoderOnly):
    """A Gemma of a given configuration, as pure functions on explicit parameters."""

    config: GemmaConfig
    root = GemmaDecoder
