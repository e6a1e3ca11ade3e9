"""SentencePiece and bytes, as T5s use them, and numbers for a missing vocabulary."""

import functools
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import sentencepiece

from speculative.disk import reading
from speculative.special_tokens import SpecialTokens
from speculative.types import EOS_ID
from speculative.vocabulary.base import (
    BYTES,
    EXTRA_IDS,
    Vocabulary,
)


class SentencePiece(Vocabulary):
    """SentencePiece's pieces, and sentinels that count down, as in T5."""

    usual_extra_ids = EXTRA_IDS

    def __init__(
        self,
        path: str | os.PathLike[str],
        extra_ids: int = 0,
        special: SpecialTokens = SpecialTokens(),  # noqa: B008
    ):
        """Loads a model; raises ValueError if the file is missing or not a SentencePiece model."""
        self.path, self.extra_ids = pathlib.Path(path), extra_ids
        if not self.path.is_file():
            raise ValueError(f"There is no vocabulary at {self.path}.")
        self._processor = sentencepiece.SentencePieceProcessor()
        with reading(self.path, "is no SentencePiece model"):
            self._processor.Load(str(self.path))
        self._known: int = self._processor.GetPieceSize()
        self.size = self._known + extra_ids
        end = self._processor.eos_id()
        self._adopt(special, self._id, EOS_ID if end < 0 else end)
        # Added tokens by their ids; the unknown token is shown as SentencePiece shows it.
        unknown = self._processor.unk_id()
        self._named = {token.id: token for token in self._added.values() if token.id != unknown}
        # Pieces that stand for no text, such as padding.
        control = self._processor.IsControl(list(range(self._known)))
        self._nothing = frozenset(i for i, one in enumerate(control) if one)

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """See `Vocabulary`."""
        return self._listed(self._own)

    @functools.cached_property
    def _own(self) -> list[str]:
        with reading(self.path, "is no SentencePiece model"):
            return self._processor.IdToPiece(list(range(self._known)))

    def _id(self, piece: str) -> int | None:
        token = self._processor.PieceToId(piece)
        return token if self._processor.IdToPiece(token) == piece else None

    def _sentinels(self) -> Iterator[tuple[int, str]]:
        last = self.size - 1
        for i in range(self.extra_ids):
            yield last - i, f"<extra_id_{i}>"

    def encode(self, text: str) -> np.ndarray:
        """See `Vocabulary`."""
        if self._added:
            return super().encode(text)
        return np.array([*self._processor.EncodeAsIds(text), self.end_id], np.int32)

    def _encode(self, text: str) -> list[int]:
        return self._processor.EncodeAsIds(text)

    def _text(self, tokens: list[int], special: bool) -> str:
        text, kept = "", list[int]()
        for token in tokens:
            if (name := self._named.get(token)) or token in self._nothing:
                if special or name and not name.special:
                    text = self._behind(text, kept) + self.pieces[token].replace("▁", " ")
                    kept = []
            elif 0 <= token < self._known:
                kept.append(token)
        return self._behind(text, kept) if text else self._processor.DecodeIds(kept)

    def _behind(self, text: str, tokens: list[int]) -> str:
        """A text followed by that of some pieces, whose first space is then kept."""
        inside = text and tokens and self._own[tokens[0]].startswith("▁")
        return text + " " * bool(inside) + self._processor.DecodeIds(tokens)


class Bytes(Vocabulary):
    """UTF-8's bytes, each plus 3, as in ByT5 (Xue et al., 2022)."""

    usual_extra_ids, of_bytes = 125, True
    _first, _known = 3, 3 + 256  # After padding, end and unknown.

    def __init__(
        self,
        extra_ids: int = 0,
        special: SpecialTokens = SpecialTokens(),  # noqa: B008
    ):
        self.path, self.extra_ids = pathlib.Path(BYTES), extra_ids
        self.size = self._known + extra_ids
        ids: dict[str, int] = dict(zip(self._named, range(self._first), strict=True))
        self._adopt(special, ids.get, EOS_ID)

    _named: tuple[str, ...] = "<pad>", "</s>", "<unk>"

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every token, by id, bytes in hexadecimal; sentinels count up, as in transformers."""
        return self._listed([*self._named, *(f"<0x{byte:02X}>" for byte in range(256))])

    def _sentinels(self) -> Iterator[tuple[int, str]]:
        for i in range(self.extra_ids):
            yield self._known + i, f"<extra_id_{i}>"

    def _encode(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]

    def _text(self, tokens: list[int], special: bool) -> str:
        shown = {token.id for token in self._added.values() if special or not token.special}
        shown |= {*range(self._first)} if special else set()
        encoded = bytearray()
        for token in tokens:
            if token in shown:
                encoded += self.pieces[token].encode()
            elif self._first <= token < self._known:
                encoded.append(token - self._first)
        return encoded.decode(errors="ignore")  # Drops bytes that are not UTF-8.


class Numbers(Vocabulary):
    """The substitute for a missing vocabulary: tokens are written as their numbers."""

    def __init__(self, size: int):
        self.path, self.size = pathlib.Path("numbers"), size

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every number, by id."""
        return tuple(f"▁{number}" for number in range(self.size))

    def _tokens(self, text: str) -> list[int]:
        raise ValueError("There is no vocabulary to encode text with; give one (--vocabulary).")

    def decode(self, tokens: np.ndarray | list[int], special: bool = False) -> str:
        """The tokens' numbers, including the end's, separated by spaces."""
        return self._text([int(token) for token in tokens], special)

    def _text(self, tokens: list[int], special: bool) -> str:
        return " ".join(map(str, tokens))
