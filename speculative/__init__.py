"""Exact speculative decoding in JAX (Leviathan et al., arXiv 2211.17192)."""

from speculative.loading import load
from speculative.pair import Pair, Result
from speculative.sampling import Sampling

__all__ = ["Pair", "Result", "Sampling", "load"]
__version__ = "0.1.0"
