"""Models: one folder per family, behind `interface` and `registry`."""

from speculative.models.config import Config
from speculative.models.decoder_only import DecoderOnly
from speculative.models.flax_model import FlaxModel
from speculative.models.gpt import DecoderOnlyConfig
from speculative.models.llama import LlamaConfig
from speculative.models.registry import (
    FAMILIES,
    SIZES,
    abstract_params,
    format_of,
    model_of,
    named,
    names_of,
    random_params,
    read_by_step,
)
from speculative.models.t5 import T5, T5Config

__all__ = [
    "FAMILIES", "SIZES", "T5", "Config", "DecoderOnly", "DecoderOnlyConfig", "FlaxModel",
    "LlamaConfig", "T5Config", "abstract_params", "format_of", "model_of", "named", "names_of",
    "random_params", "read_by_step",
]  # fmt: skip
