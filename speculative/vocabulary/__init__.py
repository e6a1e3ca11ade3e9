"""Vocabularies: SentencePiece and bytes, as in T5s, and those of the library tokenizers."""

import os
import pathlib
import shutil

from speculative.special_tokens import SpecialTokens
from speculative.vocabulary.base import (
    BYTES,
    END_OF_TEXT,
    EXTRA_IDS,
    MERGES,
    PAIRS,
    TOKENIZER,
    Rendered,
    Vocabulary,
)
from speculative.vocabulary.pieces import Bytes, Numbers, SentencePiece
from speculative.vocabulary.tokenizer import Tokenizer, read_file

__all__ = [
    "BYTES",
    "END_OF_TEXT",
    "EXTRA_IDS",
    "MERGES",
    "PAIRS",
    "TOKENIZER",
    "Bytes",
    "Numbers",
    "Rendered",
    "SentencePiece",
    "Tokenizer",
    "Vocabulary",
    "from_elsewhere",
    "open_vocabulary",
    "store",
]


def open_vocabulary(
    path: str | os.PathLike[str],
    extra_ids: int = 0,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008
    rows: int | None = None,
) -> Vocabulary:
    """The vocabulary of a file: `Tokenizer` if its name ends in .json, otherwise SentencePiece.

    The path `BYTES` stands for bytes, which need no file. `extra_ids` sentinels follow
    SentencePiece's pieces or the bytes; a `Tokenizer` has its own. `special` holds a checkpoint's
    settings of tokens, and `rows` is the number of rows of its embedding.
    """
    if os.fspath(path) == BYTES:
        return Bytes(extra_ids, special)
    if pathlib.Path(path).suffix == ".json":
        return Tokenizer(path, special, rows)
    return SentencePiece(path, extra_ids, special)


def from_elsewhere(
    path: str | os.PathLike[str],
    rows: int,
    special: SpecialTokens = SpecialTokens(),  # noqa: B008
) -> Vocabulary:
    """The vocabulary of a file that did not come with its model; see `open_vocabulary`.

    The usual sentinels follow its pieces if the model's embedding has enough `rows`.
    """
    vocabulary = open_vocabulary(path, special=special, rows=rows)
    usual = vocabulary.usual_extra_ids
    room = usual and vocabulary.size + usual <= rows
    return open_vocabulary(path, usual, special) if room else vocabulary


def store(path: pathlib.Path, folder: pathlib.Path, special: SpecialTokens) -> str:
    """Copies a vocabulary into a folder as a single file, if it has one; returns its name."""
    if os.fspath(path) == BYTES:
        return BYTES
    if path.name != PAIRS:
        shutil.copy(path, folder / path.name)
        return path.name
    read_file(path, special).save(str(folder / TOKENIZER))
    return TOKENIZER
