"""Drafts without a model, by name; some read a table that lies beside their target's weights."""

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from speculative.drafts import ngram, suffix
from speculative.drafts.base import Draft
from speculative.drafts.copying import CopyDraft
from speculative.drafts.ngram import NgramDraft
from speculative.drafts.suffix import SuffixDraft
from speculative.drafts.tables import Table
from speculative.drafts.uniform import UniformDraft
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary


class ModelFree(NamedTuple):
    """How a draft without a checkpoint is made, and its parameters are read, if it has any."""

    make: Callable[[bool], Draft]  # Whether the target is decoder-only -> the draft.
    table: Table | None = None  # The file with the parameters.
    load: Callable[[pathlib.Path, Vocabulary], PyTree] | None = None


def _ngram(order: int) -> ModelFree:
    load = functools.partial(ngram.load, order=order)
    return ModelFree(functools.partial(NgramDraft, order), ngram.TABLE, load)


# A new draft without a checkpoint is one entry here.
MODEL_FREE = {
    "uniform": ModelFree(lambda decoder_only: UniformDraft()),
    "unigram": _ngram(1),
    "bigram": _ngram(2),
    "trigram": _ngram(3),
    "copy": ModelFree(CopyDraft),
    "suffix": ModelFree(SuffixDraft, suffix.TABLE, suffix.load),
}


def table(name: str, folder: pathlib.Path | None) -> pathlib.Path | None:
    """The file that a draft reads in its target's folder, if it reads one.

    Raises:
        ValueError: there is no such file, or no folder (None), as for random weights.
    """
    reads = MODEL_FREE[name].table if name in MODEL_FREE else None
    if reads is None:
        return None
    if folder is None:
        raise ValueError(f"Random weights have no text to count for {name}; take another draft.")
    path = folder / reads.file
    if not path.is_file():
        raise ValueError(
            f"The draft {name!r} needs {path}, which does not exist; make it with "
            f"{reads.script}, in a local folder beside the target's weights."
        )
    return path


def model_free(
    name: str, decoder_only: bool, path: pathlib.Path | None, vocabulary: Vocabulary
) -> tuple[Draft, PyTree]:
    """A draft of `MODEL_FREE` and its parameters, from the `table` at this path."""
    make, _, load = MODEL_FREE[name]
    return make(decoder_only), load(path, vocabulary) if load and path else ()
