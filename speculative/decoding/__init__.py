"""Decoding: knows models and drafts by their verbs alone."""

from speculative.decoding import autoregressive, reference, speculative
from speculative.decoding.settings import EOS_ID, Decoding, Output, random_draws
from speculative.decoding.speculative import Params, stream

__all__ = [
    "EOS_ID",
    "Decoding",
    "Output",
    "Params",
    "autoregressive",
    "random_draws",
    "reference",
    "speculative",
    "stream",
]
