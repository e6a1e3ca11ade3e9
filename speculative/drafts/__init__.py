"""Drafts, which guess the next tokens, behind one interface."""

from speculative.drafts.base import Draft, Proposal
from speculative.drafts.copying import CopyDraft
from speculative.drafts.hidden import HiddenDraft, model_draft
from speculative.drafts.mixed import MixedDraft
from speculative.drafts.ngram import NgramDraft, NgramParams, count_ngrams, ngram_params
from speculative.drafts.suffix import SuffixDraft
from speculative.drafts.transformer import TransformerDraft
from speculative.drafts.uniform import UniformDraft

__all__ = [
    "CopyDraft", "Draft", "HiddenDraft", "MixedDraft", "NgramDraft", "NgramParams", "Proposal",
    "SuffixDraft", "TransformerDraft", "UniformDraft", "count_ngrams", "model_draft",
    "ngram_params",
]  # fmt: skip
