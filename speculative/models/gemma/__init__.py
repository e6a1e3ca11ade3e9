"""Gemma 2 and the text models of Gemma 3."""

from speculative.models.gemma.config import SIZES, GemmaConfig
from speculative.models.gemma.names import GemmaNames

__all__ = ["SIZES", "GemmaConfig", "GemmaNames"]
