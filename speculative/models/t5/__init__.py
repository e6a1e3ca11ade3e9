"""T5: an encoder and a decoder."""

from speculative.models.t5.config import SIZES, T5Config
from speculative.models.t5.module import T5
from speculative.models.t5.names import T5Names

__all__ = ["SIZES", "T5", "T5Config", "T5Names"]
