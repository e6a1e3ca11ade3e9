"""Drafts without a model, by name; some read a table that lies beside their target's weights."""

import pathlib

from speculative.drafts import ngram, suffix
from speculative.drafts.base import Draft
from speculative.drafts.copying import CopyDraft
from speculative.drafts.ngram import NgramDraft
from speculative.drafts.suffix import SuffixDraft
from speculative.drafts.uniform import UniformDraft
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary

ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3}
"""Tokens of the n-grams, by the name of the draft."""

MODEL_FREE = ("uniform", *ORDERS, "copy", "suffix")
"""Drafts without a checkpoint."""

NGRAMS, PAST_OUTPUTS = "ngrams.npz", "past_outputs.npz"
TABLES = {**dict.fromkeys(ORDERS, NGRAMS), "suffix": PAST_OUTPUTS}
"""The file that a draft reads."""

_MADE_BY = {NGRAMS: "scripts/count_ngrams.py", PAST_OUTPUTS: "scripts/keep_outputs.py"}


def table(name: str, folder: pathlib.Path) -> pathlib.Path | None:
    """The file that a draft reads in its target's folder; None where it reads none.

    Raises:
        ValueError: there is no such file.
    """
    if name not in TABLES:
        return None
    path = folder / TABLES[name]
    if not path.is_file():
        raise ValueError(
            f"The draft {name!r} needs {path}, which does not exist; make it with "
            f"{_MADE_BY[path.name]}, in a local folder beside the target's weights."
        )
    return path


def require_no_table(name: str) -> None:
    """Raises ValueError for a draft that counts text: random weights write none."""
    if name in TABLES:
        raise ValueError(f"Random weights have no text to count for {name}; take another draft.")


def model_free(
    name: str, continues: bool, folder: pathlib.Path, vocabulary: Vocabulary
) -> tuple[Draft, PyTree]:
    """A draft of `MODEL_FREE` and its parameters.

    Args:
        name: of the draft.
        continues: whether texts go on from their inputs, as a decoder-only target's do.
        folder: of the target's weights.
        vocabulary: the target's.

    Raises:
        ValueError: its table is missing, damaged, or of another vocabulary.
    """
    path = table(name, folder)
    if name == "uniform":
        return UniformDraft(), ()
    if path is None:
        return CopyDraft(continues), ()
    if name == "suffix":
        return SuffixDraft(continues), suffix.load(path, vocabulary)
    draft = NgramDraft(ORDERS[name], continues)
    return draft, ngram.load(path, vocabulary, draft.order)
