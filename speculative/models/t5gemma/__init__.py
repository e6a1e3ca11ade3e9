"""T5Gemma: an encoder and a decoder of Gemma 2's layers."""

from speculative.models.t5gemma.config import SIZES, T5GemmaConfig
from speculative.models.t5gemma.names import T5GemmaNames

__all__ = ["SIZES", "T5GemmaConfig", "T5GemmaNames"]
