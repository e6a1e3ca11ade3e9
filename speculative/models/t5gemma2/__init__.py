"""T5Gemma 2: an encoder and a decoder of Gemma 3's layers; the decoder also reads the source."""

from speculative.models.t5gemma2.config import SIZES, T5Gemma2Config
from speculative.models.t5gemma2.names import T5Gemma2Names

__all__ = ["SIZES", "T5Gemma2Config", "T5Gemma2Names"]
