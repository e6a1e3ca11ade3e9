"""A SentencePiece vocabulary with T5's conventions: pad 0, end of sequence 1, unknown 2."""

import functools
import pathlib

import numpy as np
import sentencepiece

from speculative.types import EOS_ID

EXTRA_IDS = 100
"""Sentinel tokens that T5 puts after the pieces of its vocabulary."""


class Vocabulary:
    """Text to tokens and back; two vocabularies are equal when their pieces are."""

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

    def encode(self, text: str) -> np.ndarray:
        """Tokens [length] of a text, closed by the end of sequence: int32."""
        return np.array([*self._processor.EncodeAsIds(text), EOS_ID], np.int32)

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


def from_elsewhere(path: str | pathlib.Path, rows: int) -> Vocabulary:
    """A vocabulary that did not come with its model: T5's sentinels follow where there is room.

    Args:
        path: the SentencePiece model.
        rows: of the model's embedding.

    Raises:
        ValueError: as `Vocabulary`.
    """
    vocabulary = Vocabulary(path)
    return Vocabulary(path, EXTRA_IDS) if vocabulary.size + EXTRA_IDS <= rows else vocabulary


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
