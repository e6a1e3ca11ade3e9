"""T5Gemma: the Flax module, and the model over it."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from speculative.models.encoder_decoder import EncoderDecoder, Seq2Seq
from speculative.models.t5gemma.config import T5GemmaConfig
from speculative.types import Tokens


class T5GemmaEncoderDecoder(EncoderDecoder):
    """Encoder and decoder with their own embeddings, each scaled by the square root of its D."""

    def embedded(self, table: nn.Embed, tokens: Tokens) -> Array:
        """See `Transformer.embedded`; the result is scaled."""
        x = super().embedded(table, tokens)
        return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)


@dataclasses.dataclass(frozen=True)
class T5Gemma(Seq2Seq):
    """A T5Gemma of a given configuration, as pure functions on explicit parameters."""

    config: T5GemmaConfig
    root = T5GemmaEncoderDecoder
