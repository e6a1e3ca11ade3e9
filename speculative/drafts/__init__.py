"""Drafts: what guesses the next tokens, behind one face."""

from speculative.drafts.base import Draft, Proposal
from speculative.drafts.ngram import BigramDraft, bigram_params, count_bigrams
from speculative.drafts.transformer import TransformerDraft
from speculative.drafts.uniform import UniformDraft

__all__ = [
    "BigramDraft",
    "Draft",
    "Proposal",
    "TransformerDraft",
    "UniformDraft",
    "bigram_params",
    "count_bigrams",
]
