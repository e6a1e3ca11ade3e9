"""Decoder-only models: those like GPT-2, and those like LaMDA, with T5's layers."""

from speculative.models.gpt.config import GPT, LAMDA, SIZES, DecoderOnlyConfig
from speculative.models.gpt.names import GPTNames

__all__ = ["GPT", "LAMDA", "SIZES", "DecoderOnlyConfig", "GPTNames"]
