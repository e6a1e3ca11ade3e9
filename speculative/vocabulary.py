"""Vocabularies: SentencePiece and bytes as in T5s (pad 0, end 1, unknown 2), and GPT-2's."""

import abc
import functools
import hashlib
import itertools
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import sentencepiece

from speculative.disk import reading
from speculative.types import EOS_ID, PAD_ID

EXTRA_IDS = 100  # Sentinel tokens after the pieces of T5's vocabulary.
# The files of GPT-2's vocabulary: the first alone, or the older two together.
TOKENIZER, PAIRS, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
BYTES = "bytes"  # The name of ByT5's vocabulary, which has no file.
END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token.


class Vocabulary(abc.ABC):
    """Turns text into tokens and back."""

    path: pathlib.Path  # Its file, or the name of a vocabulary that needs none.
    size: int  # Tokens V, the sentinels included.
    extra_ids: int = 0  # Sentinels after its pieces.
    eos_ids: tuple[int, ...] = (EOS_ID,)  # Each ends a text; the first is given to a text.
    start_id: int = PAD_ID  # The token before a text.
    usual_extra_ids: int = 0  # The sentinels that such a vocabulary comes with.
    of_bytes: bool = False  # Whether pieces are made of bytes, and so cover every script.

    @functools.cached_property
    @abc.abstractmethod
    def pieces(self) -> tuple[str, ...]:
        """Every piece, by id."""

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Tokens [length] of a text and the end of sequence, int32."""

    @abc.abstractmethod
    def _text(self, tokens: list[int]) -> str:
        """The text of tokens that do not end it; what stands for no text is left out."""

    def decode(self, tokens: np.ndarray | list[int]) -> str:
        """The text of tokens, up to the end of sequence."""
        before_end = itertools.takewhile(lambda token: token not in self.eos_ids, map(int, tokens))
        return self._text(list(before_end))

    def prompt(self, text: str) -> np.ndarray:
        """The tokens that a decoder-only model continues: the start token and the text's, int32."""
        return np.append(self.start_id, self.encode(text)[:-1]).astype(np.int32)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the pieces, in hexadecimal."""
        return hashlib.sha256("\0".join(self.pieces).encode()).hexdigest()

    def spelled_out(self, text: str) -> float:
        """The share of a text's characters that no piece has, as of another script, from 0 to 1.

        They are unknown, or spelled in bytes. Of tokens it would be less where a row of unknown
        characters is one token, as in T5's vocabulary.
        """
        if self.of_bytes:
            return 0.0
        # What unknown pieces and single bytes decode to.
        marks = {"\N{REPLACEMENT CHARACTER}", "\N{DOUBLE QUESTION MARK}"}
        whole = [token for token in self.encode(text) if marks.isdisjoint(self.decode([token]))]
        kept, given = ("".join(words.split()) for words in (self.decode(whole), text))
        # One character may be normalised to several, as in a ligature.
        return max(0.0, 1 - len(kept) / len(given)) if given else 0.0

    def require_room(self, rows: int, model: str) -> None:
        """Raises ValueError if it has more pieces than a model's embedding has rows."""
        if self.size > rows:
            raise ValueError(
                f"{model} has {rows} embeddings, fewer than the {self.size} pieces of its "
                f"vocabulary {self.path}."
            )

    def require_equal(self, other: "Vocabulary") -> None:
        """Raises ValueError unless both have the same pieces under the same ids."""
        must = "Target and draft must share a vocabulary, but"
        for i, (mine, theirs) in enumerate(zip(self.pieces, other.pieces, strict=False)):
            if mine != theirs:
                raise ValueError(
                    f"{must} token {i} is {mine!r} in {self.path} and {theirs!r} in {other.path}."
                )
        if self.size != other.size:
            raise ValueError(
                f"{must} {self.path} has {self.size} pieces and {other.path} has {other.size}."
            )


class SentencePiece(Vocabulary):
    """SentencePiece's pieces, and sentinels that count down, as in T5."""

    usual_extra_ids = EXTRA_IDS

    def __init__(self, path: str | os.PathLike[str], extra_ids: int = 0):
        """Loads a model; raises ValueError if the file is missing or no SentencePiece model."""
        self.path, self.extra_ids = pathlib.Path(path), extra_ids
        if not self.path.is_file():
            raise ValueError(f"There is no vocabulary at {self.path}.")
        self._processor = sentencepiece.SentencePieceProcessor()
        with reading(self.path, "is no SentencePiece model"):
            self._processor.Load(str(self.path))
        self._known: int = self._processor.GetPieceSize()
        self.size = self._known + extra_ids

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """See `Vocabulary`."""
        with reading(self.path, "is no SentencePiece model"):
            known = self._processor.IdToPiece(list(range(self._known)))
        return (*known, *(f"<extra_id_{i}>" for i in reversed(range(self.extra_ids))))

    def encode(self, text: str) -> np.ndarray:
        """See `Vocabulary`."""
        return np.array([*self._processor.EncodeAsIds(text), self.eos_ids[0]], np.int32)

    def _text(self, tokens: list[int]) -> str:
        return self._processor.DecodeIds([i for i in tokens if 0 < i < self._known])


class Bytes(Vocabulary):
    """UTF-8's bytes, each 3 more than it is, as in ByT5 (Xue et al., 2022)."""

    usual_extra_ids, of_bytes = 125, True
    _first, _known = 3, 3 + 256  # Behind padding, end and unknown.

    def __init__(self, extra_ids: int = 0):
        self.path, self.extra_ids = pathlib.Path(BYTES), extra_ids
        self.size = self._known + extra_ids

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every token, by id, bytes in hexadecimal; sentinels count up, as in transformers."""
        known = (f"<0x{byte:02X}>" for byte in range(256))
        sentinels = (f"<extra_id_{i}>" for i in range(self.extra_ids))
        return ("<pad>", "</s>", "<unk>", *known, *sentinels)

    def encode(self, text: str) -> np.ndarray:
        """See `Vocabulary`."""
        return np.array([*(self._first + i for i in text.encode()), self.eos_ids[0]], np.int32)

    def _text(self, tokens: list[int]) -> str:
        found = [i - self._first for i in tokens if self._first <= i < self._known]
        return bytes(found).decode(errors="ignore")  # Without bytes that are no UTF-8.


class BytePairs(Vocabulary):
    """GPT-2's byte pairs, with one token between texts (Radford et al., 2019)."""

    of_bytes = True

    def __init__(self, path: str | os.PathLike[str]):
        """Loads a `tokenizer.json`, or a `vocab.json` with the `merges.txt` beside it."""
        self.path = pathlib.Path(path)
        self._tokenizer = _byte_pairs(self.path)
        end = self._tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"{self.path} is not of GPT-2's kind: it has no piece {END_OF_TEXT}.")
        self.start_id, self.eos_ids = int(end), (int(end),)
        self.size = self._tokenizer.get_vocab_size()

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every piece, by id, with its bytes spelled as GPT-2 spells them."""
        return tuple(self._tokenizer.id_to_token(i) or "" for i in range(self.size))

    def encode(self, text: str) -> np.ndarray:
        """See `Vocabulary`."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*ids, self.eos_ids[0]], np.int32)

    def prompt(self, text: str) -> np.ndarray:
        """The text's tokens; for an empty text the end of a text before it, int32."""
        return self.encode(text)[:-1] if text else self.encode(text)

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([i for i in tokens if 0 <= i < self.size])


def _byte_pairs(path: pathlib.Path) -> Any:
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
    with reading(path, "is no vocabulary of byte pairs"):
        if path.name == PAIRS:
            model = tokenizers.models.BPE.from_file(str(path), str(merges))
            tokenizer = tokenizers.Tokenizer(model)
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = tokenizers.decoders.ByteLevel()
            tokenizer.add_special_tokens([END_OF_TEXT])
        else:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # A file may set a length to which texts are cut or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_vocabulary(path: str | os.PathLike[str], extra_ids: int = 0) -> Vocabulary:
    """The vocabulary of a file: byte pairs if its name ends in .json, otherwise SentencePiece.

    The path `BYTES` is that of bytes, which need no file. `extra_ids` sentinels follow
    SentencePiece's pieces or the bytes; byte pairs have none.
    """
    if os.fspath(path) == BYTES:
        return Bytes(extra_ids)
    if pathlib.Path(path).suffix == ".json":
        return BytePairs(path)
    return SentencePiece(path, extra_ids)


def from_elsewhere(path: str | os.PathLike[str], rows: int) -> Vocabulary:
    """The vocabulary of a file that did not come with its model; see `open_vocabulary`.

    The usual sentinels follow its pieces if the model's embedding has enough `rows`.
    """
    vocabulary = open_vocabulary(path)
    usual = vocabulary.usual_extra_ids
    return open_vocabulary(path, usual) if vocabulary.size + usual <= rows else vocabulary


def store(path: pathlib.Path, folder: pathlib.Path) -> str:
    """Copies a vocabulary into a folder as a single file, if it has one; returns its name."""
    if os.fspath(path) == BYTES:
        return BYTES
    if path.name != PAIRS:
        shutil.copy(path, folder / path.name)
        return path.name
    _byte_pairs(path).save(str(folder / TOKENIZER))
    return TOKENIZER


class Numbers(Vocabulary):
    """The substitute where there is no vocabulary: tokens are written as their numbers."""

    def __init__(self, size: int):
        self.path, self.size = pathlib.Path("numbers"), size

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every number, by id."""
        return tuple(f"▁{number}" for number in range(self.size))

    def encode(self, text: str) -> np.ndarray:
        """Raises ValueError, because no text can be encoded."""
        raise ValueError("There is no vocabulary to encode text with; give one (--vocabulary).")

    def decode(self, tokens: np.ndarray | list[int]) -> str:
        """The tokens' numbers, the end's too, separated by spaces."""
        return self._text([int(token) for token in tokens])

    def _text(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))
