"""T5: the Flax module, whose parameters have T5X's names, and the model over it."""

import dataclasses

from jax import Array

from speculative.backends import Norm
from speculative.models.encoder_decoder import EncoderDecoder, Seq2Seq
from speculative.models.t5.config import T5Config
from speculative.types import Logits


class T5EncoderDecoder(EncoderDecoder):
    """Encoder and decoder."""

    def logits(self, x: Array, norm: Norm | None = None) -> Logits:
        """See `Transformer.logits`; T5 scales logits that are tied to the embedding."""
        logits = super().logits(x, norm)
        return logits * self.config.emb_dim**-0.5 if self.config.logits_via_embedding else logits


@dataclasses.dataclass(frozen=True)
class T5(Seq2Seq):
    """A T5 of a given configuration, as pure functions on explicit parameters."""

    config: T5Config
    root = T5EncoderDecoder
