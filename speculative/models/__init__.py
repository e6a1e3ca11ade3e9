"""Models of three verbs on explicit state; nothing above this floor knows Flax."""

from speculative.models.config import SIZES, Config, DecoderOnlyConfig, T5Config, named
from speculative.models.decoder_only import DecoderOnly
from speculative.models.model import FlaxModel
from speculative.models.packing import for_decoding, pack
from speculative.models.params import abstract_params, model_of, random_params, read_by_step
from speculative.models.t5 import T5

__all__ = [
    "SIZES",
    "T5",
    "Config",
    "DecoderOnly",
    "DecoderOnlyConfig",
    "FlaxModel",
    "T5Config",
    "abstract_params",
    "for_decoding",
    "model_of",
    "named",
    "pack",
    "random_params",
    "read_by_step",
]
