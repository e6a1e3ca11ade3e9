"""Vocabularies: SentencePiece's with T5's conventions (pad 0, end 1, unknown 2), and GPT-2's."""

import functools
import hashlib
import pathlib
import shutil
from typing import Any

import numpy as np
import sentencepiece

from speculative.types import EOS_ID, PAD_ID

EXTRA_IDS = 100
"""Sentinel tokens that T5 puts after the pieces of its vocabulary."""
TOKENIZER, PAIRS, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
"""The files of GPT-2's vocabulary: all of it in one, or in the older two."""
END_OF_TEXT = "<|endoftext|>"
"""GPT-2's only special token."""


class Vocabulary:
    """Text to tokens and back; two vocabularies are equal when their pieces are.

    Attributes:
        path: its file.
        extra_ids: sentinels after its pieces.
        eos_id: the token that ends a text.
    """

    eos_id: int = EOS_ID

    def __init__(self, path: str | pathlib.Path, extra_ids: int = 0):
        """Loads a SentencePiece model; `extra_ids` sentinels follow its pieces (T5 has 100).

        Raises:
            ValueError: the file is missing or no SentencePiece model.
        """
        self.path = pathlib.Path(path)
        self.extra_ids = extra_ids
        if not self.path.is_file():
            raise ValueError(f"There is no vocabulary at {self.path}.")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.Load(str(self.path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{self.path} is no SentencePiece model: {error}.") from error

    @property
    def size(self) -> int:
        """Tokens V, the extra ids included."""
        return self._processor.GetPieceSize() + self.extra_ids

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every piece, by id."""
        return tuple(
            self._processor.IdToPiece(i) for i in range(self._processor.GetPieceSize())
        ) + tuple(f"<extra_id_{i}>" for i in reversed(range(self.extra_ids)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the pieces, in hexadecimal: equal where the vocabularies are."""
        return hashlib.sha256("\0".join(self.pieces).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Tokens [length] of a text, closed by the end of sequence: int32."""
        return np.array([*self._processor.EncodeAsIds(text), EOS_ID], np.int32)

    def prompt(self, text: str) -> np.ndarray:
        """What a decoder-only model goes on from: the start token and the text's, int32."""
        return np.append(PAD_ID, self.encode(text)[:-1]).astype(np.int32)

    def decode(self, tokens: np.ndarray | list[int]) -> str:
        """The text of tokens, up to the end of sequence."""
        ids = [int(token) for token in tokens]
        ids = ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids
        known = self._processor.GetPieceSize()
        return self._processor.DecodeIds([i for i in ids if 0 < i < known])

    def require_equal(self, other: "Vocabulary") -> None:
        """Raises ValueError unless both have the same pieces under the same ids."""
        for i, (mine, theirs) in enumerate(zip(self.pieces, other.pieces, strict=False)):
            if mine != theirs:
                raise ValueError(
                    f"Target and draft must share a vocabulary, but token {i} is {mine!r} in "
                    f"{self.path} and {theirs!r} in {other.path}."
                )
        if self.size != other.size:
            raise ValueError(
                f"Target and draft must share a vocabulary, but {self.path} has {self.size} "
                f"pieces and {other.path} has {other.size}."
            )


class BytePairs(Vocabulary):
    """GPT-2's kind: byte pairs, with one token between texts (Radford et al., 2019).

    The tokenizers package is needed, and imported here alone.
    """

    def __init__(self, path: str | pathlib.Path):
        """Loads a `tokenizer.json`, or a `vocab.json` with the `merges.txt` beside it.

        Raises:
            ValueError: a file is missing or damaged, or the tokenizers package is not installed.
        """
        self.path, self.extra_ids = pathlib.Path(path), 0
        self._tokenizer = _byte_pairs(self.path)
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"{self.path} is not of GPT-2's kind: it has no piece {END_OF_TEXT}.")
        self.eos_id = int(end)

    @property
    def size(self) -> int:
        """Tokens V."""
        return self._tokenizer.get_vocab_size()

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every piece, by id, its bytes spelled as GPT-2 does."""
        return tuple(self._tokenizer.id_to_token(i) or "" for i in range(self.size))

    def encode(self, text: str) -> np.ndarray:
        """Tokens [length] of a text, closed by the end of text: int32."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*ids, self.eos_id], np.int32)

    def prompt(self, text: str) -> np.ndarray:
        """What a model goes on from: the text's tokens, or the end of another text, int32."""
        return self.encode(text)[:-1] if text else self.encode(text)

    def decode(self, tokens: np.ndarray | list[int]) -> str:
        """The text of tokens, up to the end of text."""
        ids = [int(token) for token in tokens]
        ids = ids[: ids.index(self.eos_id)] if self.eos_id in ids else ids
        return self._tokenizer.decode([i for i in ids if 0 <= i < self.size])


def _byte_pairs(path: pathlib.Path) -> Any:
    """The tokenizers package's object for a file."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ValueError(
            f"To read the vocabulary {path}, install tokenizers: pip install tokenizers."
        ) from error
    merges = path.with_name(MERGES)
    for file in (path, merges) if path.name == PAIRS else (path,):
        if not file.is_file():
            raise ValueError(f"There is no vocabulary at {path}: {file.name} is missing.")
    try:
        if path.name == PAIRS:
            model = tokenizers.models.BPE.from_file(str(path), str(merges))
            tokenizer = tokenizers.Tokenizer(model)
            pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.pre_tokenizer = pieces
            tokenizer.decoder = tokenizers.decoders.ByteLevel()
            tokenizer.add_special_tokens([END_OF_TEXT])
        else:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises nothing narrower.
        raise ValueError(f"{path} is no vocabulary of byte pairs: {error}.") from error
    # A file may ask for a length of its own.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_vocabulary(path: str | pathlib.Path, extra_ids: int = 0) -> Vocabulary:
    """The vocabulary of a file: GPT-2's kind where its name ends in .json, else SentencePiece's.

    Args:
        path: the file.
        extra_ids: sentinels after the pieces of a SentencePiece model; byte pairs have none.

    Raises:
        ValueError: as `Vocabulary` and `BytePairs`.
    """
    json = pathlib.Path(path).suffix == ".json"
    return BytePairs(path) if json else Vocabulary(path, extra_ids)


def from_elsewhere(path: str | pathlib.Path, rows: int) -> Vocabulary:
    """A vocabulary that did not come with its model: T5's sentinels follow where there is room.

    Args:
        path: as `open_vocabulary`.
        rows: of the model's embedding.

    Raises:
        ValueError: as `open_vocabulary`.
    """
    vocabulary = open_vocabulary(path)
    room = vocabulary.size + EXTRA_IDS <= rows
    return open_vocabulary(path, EXTRA_IDS) if room else vocabulary


def store(path: pathlib.Path, folder: pathlib.Path) -> str:
    """Copies a vocabulary into a folder, as one file whatever it was; gives the file's name."""
    if path.name != PAIRS:
        shutil.copy(path, folder / path.name)
        return path.name
    _byte_pairs(path).save(str(folder / TOKENIZER))
    return TOKENIZER


class Numbers(Vocabulary):
    """What stands for a vocabulary where there is none: tokens are written as their numbers."""

    def __init__(self, size: int):
        """For tokens 0 to `size` - 1."""
        self.path, self.extra_ids, self._size = pathlib.Path("numbers"), 0, size

    @property
    def size(self) -> int:
        """Tokens V."""
        return self._size

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every number, by id."""
        return tuple(f"▁{number}" for number in range(self.size))

    def encode(self, text: str) -> np.ndarray:
        """Raises ValueError: there are no words."""
        raise ValueError("There is no vocabulary to encode text with; give one (--vocabulary).")

    def decode(self, tokens: np.ndarray | list[int]) -> str:
        """The tokens as numbers, a space between."""
        return " ".join(str(int(token)) for token in tokens)
