"""Models of three verbs on explicit state; nothing above this floor knows Flax."""

from speculative.models.config import SIZES, T5Config, named
from speculative.models.packing import for_decoding, pack
from speculative.models.t5 import T5, random_params

__all__ = ["SIZES", "T5", "T5Config", "for_decoding", "named", "pack", "random_params"]
