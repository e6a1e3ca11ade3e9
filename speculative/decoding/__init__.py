"""Decoding: the loop, its rules and its reference."""

from speculative.decoding import loop, reference, rules
from speculative.decoding.adaptive import Adaptive
from speculative.decoding.loop import Params, stream
from speculative.decoding.rules import Rule, Token
from speculative.decoding.settings import Decoding, Output, random_draws

__all__ = [
    "Adaptive",
    "Decoding",
    "Output",
    "Params",
    "Rule",
    "Token",
    "loop",
    "random_draws",
    "reference",
    "rules",
    "stream",
]
