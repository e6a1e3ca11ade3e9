"""Drafts without a model, given by name or by the file counted for them.

A draft given by name only, such as `bigram`, reads the file next to the target's weights, if it
needs one. The path of a file, such as `my/ngrams.npz`, is a draft too; `bigram:my/ngrams.npz` is
the draft of that name, with this file. After a model's name, as in `my/model+copy`, one of
`LOOKUPS` is the other half of a `MixedDraft`.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from speculative.drafts import ngram, suffix, tables
from speculative.drafts.base import Draft
from speculative.drafts.copying import CopyDraft
from speculative.drafts.ngram import NgramDraft
from speculative.drafts.suffix import SuffixDraft
from speculative.drafts.tables import FileKind
from speculative.drafts.uniform import UniformDraft
from speculative.types import PyTree
from speculative.vocabulary import Vocabulary


class ModelFree(NamedTuple):
    """How to make a draft without a checkpoint, and to load its parameters if it has any."""

    make: Callable[[bool], Draft]  # Whether the target is decoder-only -> the draft.
    table: FileKind | None = None  # The file with the parameters.
    load: Callable[[pathlib.Path, Vocabulary], PyTree] | None = None


def _ngram(order: int) -> ModelFree:
    load = functools.partial(ngram.load, order=order)
    return ModelFree(functools.partial(NgramDraft, order), ngram.TABLE, load)


# Add a new draft without a checkpoint here.
MODEL_FREE = {
    "uniform": ModelFree(lambda decoder_only: UniformDraft()),
    "unigram": _ngram(1),
    "bigram": _ngram(2),
    "trigram": _ngram(3),
    "copy": ModelFree(CopyDraft),
    "suffix": ModelFree(SuffixDraft, suffix.TABLE, suffix.load),
}

# Drafts that a model may be mixed with.
LOOKUPS = ("copy", "suffix")


def known(name: str) -> bool:
    """Whether a name is in `MODEL_FREE` or a table's, which need not exist, without a model."""
    model, free = parts(name)
    return not model and bool(free)


def parts(name: str) -> tuple[str, str]:
    """The names of a draft's model and of its model-free part; either may be empty."""
    model, plus, rest = name.rpartition("+")
    if plus and rest.partition(":")[0] in LOOKUPS:
        return model, rest
    return ("", name) if name in MODEL_FREE or name.endswith(tables.SUFFIX) else (name, "")


def table(name: str, folder: pathlib.Path | None, vocabulary: Vocabulary) -> pathlib.Path | None:
    """The file that a draft reads, if any: its own or the one in its target's folder.

    Raises:
        ValueError: the file is missing or of another kind or vocabulary; or there is no folder
            (None), as for random weights.
    """
    kind, path = _split(name)
    if path is None and MODEL_FREE[kind].table is None:
        return None
    if folder is None:
        raise ValueError(f"Random weights have no text to count for {name}; take another draft.")
    reads = _entry(name).table
    if reads is None:
        raise ValueError(f"The draft {kind} reads no file; leave {path} out (--draft {kind}).")
    default = folder / reads.file
    if path is None and not default.is_file():
        raise ValueError(
            f"The draft {name!r} needs {default}, which does not exist; make it with "
            f"{reads.command}, there or elsewhere, and say where (--draft {name}:FILE)."
        )
    path = path or default
    reads.require(path, vocabulary)
    return path


def model_free(
    name: str, decoder_only: bool, path: pathlib.Path | None, vocabulary: Vocabulary
) -> tuple[Draft, PyTree]:
    """A `known` draft and its parameters, from the `table` at this path."""
    make, _, load = _entry(name)
    return make(decoder_only), load(path, vocabulary) if load and path else ()


def grows(name: str) -> bool:
    """Whether a draft guesses trees: models, mixed or not, and n-grams do."""
    model, free = parts(name)
    return bool(model) or _entry(free).make(True).grows


def _split(name: str) -> tuple[str, pathlib.Path | None]:
    """The name in `MODEL_FREE`, empty if only a file is given, and the file."""
    if name in MODEL_FREE:
        return name, None
    kind, _, file = name.partition(":")
    return (kind, pathlib.Path(file)) if kind in MODEL_FREE else ("", pathlib.Path(name))


def _entry(name: str) -> ModelFree:
    """The entry for a name; for a file of n-grams, its highest order up to `ngram.LONGEST`."""
    kind, path = _split(name)
    if path is None or kind:
        return MODEL_FREE[kind]
    with tables.opened(path) as file:
        if tables.names(file) >= {*suffix.TABLE.arrays}:
            return MODEL_FREE["suffix"]
        return _ngram(min(ngram.LONGEST, int(tables.read(file, "order"))))
