"""Llama and similar decoders: Mistral, SmolLM2, Qwen2.5, Qwen3."""

from speculative.models.llama.config import SIZES, LlamaConfig
from speculative.models.llama.names import LlamaNames

__all__ = ["SIZES", "LlamaConfig", "LlamaNames"]
