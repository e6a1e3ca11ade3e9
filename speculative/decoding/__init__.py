"""Decoding: the loop, its rules and its reference."""

from speculative.decoding.loop import Params, stream
from speculative.decoding.rule import Rule, Token
from speculative.decoding.settings import Decoding, Output

__all__ = ["Decoding", "Output", "Params", "Rule", "Token", "stream"]
