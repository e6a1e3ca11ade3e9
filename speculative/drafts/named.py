"""Drafts without a model, by name; some read a table that lies beside their target's weights."""

import contextlib
import functools
import pathlib
import zipfile
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

SUFFIX = ".npz"  # Of the files of `tables`.


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


def kind(name: str) -> str | None:
    """The name in `MODEL_FREE` that a draft's name means; None if it means none.

    That may be followed by a file: bigram:FILE.npz. A FILE.npz alone is read by the draft that it
    was made for, n-grams by trigram.
    """
    first, colon, file = name.partition(":")
    if not file.endswith(SUFFIX) and not name.endswith(SUFFIX):
        return name if name in MODEL_FREE else None
    if colon and first in MODEL_FREE:
        return first
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(name) as archive:
        return "suffix" if f"{suffix.TABLE.arrays[0]}.npy" in archive.namelist() else "trigram"
    return "trigram" if pathlib.Path(name).is_file() else None


def table(name: str, folder: pathlib.Path | None) -> pathlib.Path | None:
    """The file that a draft reads: that of its name, or else one in its target's folder.

    Raises:
        ValueError: there is no such file, or no folder (None), as for random weights.
    """
    reads = MODEL_FREE[of].table if (of := kind(name)) else None
    if name.endswith(SUFFIX):
        path = pathlib.Path(name.removeprefix(f"{of}:"))
        if reads is None:
            raise ValueError(f"The draft {of!r} reads no file; leave {path} out.")
        if not path.is_file():
            raise ValueError(f"There is no table {path}; make it with {reads.command}.")
        return path
    if reads is None:
        return None
    if folder is None:
        raise ValueError(f"Random weights have no text to count for {name}; take another draft.")
    path = folder / reads.file
    if not path.is_file():
        raise ValueError(
            f"The draft {name!r} needs {path}, which does not exist; make it with "
            f"{reads.command}, in a local folder beside the target's weights."
        )
    return path


def model_free(
    name: str, decoder_only: bool, path: pathlib.Path | None, vocabulary: Vocabulary
) -> tuple[Draft, PyTree]:
    """A draft of `MODEL_FREE` and its parameters, from the `table` at this path."""
    make, _, load = MODEL_FREE[kind(name) or name]
    return make(decoder_only), load(path, vocabulary) if load and path else ()
