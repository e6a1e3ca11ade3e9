"""Decoding: knows models and drafts by their verbs alone."""

from speculative.decoding import autoregressive, reference, speculative
from speculative.decoding.adaptive import Adaptive
from speculative.decoding.settings import Decoding, Output, random_draws
from speculative.decoding.speculative import Params, stream

__all__ = [
    "Adaptive",
    "Decoding",
    "Output",
    "Params",
    "autoregressive",
    "random_draws",
    "reference",
    "speculative",
    "stream",
]
