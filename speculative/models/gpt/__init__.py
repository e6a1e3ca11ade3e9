"""Decoder-only models: GPT-2's kind, and LaMDA's with the layers of a T5."""

from speculative.models.gpt.config import GPT, LAMDA, SIZES, DecoderOnlyConfig
from speculative.models.gpt.names import GPTNames

__all__ = ["GPT", "LAMDA", "SIZES", "DecoderOnlyConfig", "GPTNames"]
