"""The interface of vocabularies, and what they share."""

import abc
import functools
import hashlib
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from speculative import fingerprints
from speculative.special_tokens import AddedToken, SpecialTokens, pattern, split
from speculative.types import EOS_ID, PAD_ID

EXTRA_IDS = 100  # Sentinel tokens after the pieces of T5's vocabulary.
# Files of the library tokenizers; GPT-2's vocabulary is in the first, or in the other two together.
TOKENIZER, PAIRS, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
BYTES = "bytes"  # The name of ByT5's vocabulary, which has no file.
END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token.


class Rendered(str):
    """A text with all special tokens spelled out, as a chat's template renders it."""


class Vocabulary(abc.ABC):
    """Turns text into tokens and back.

    A text's added tokens, sentinels among them, are found first; the parts between them are cut
    into pieces. Special tokens, such as sentinels, are shown only on request.
    """

    path: pathlib.Path  # Its file, or the name of a vocabulary that needs none.
    size: int  # Tokens V: one more than the last, including sentinels and added ones.
    extra_ids: int = 0  # Sentinels after its pieces.
    special: SpecialTokens = SpecialTokens()  # Its checkpoint's settings of tokens.
    end_id: int = EOS_ID  # The token appended to a text.
    eos_ids: tuple[int, ...] = (EOS_ID,)  # Each ends an output.
    start_id: int = PAD_ID  # The token before a text.
    usual_extra_ids: int = 0  # The usual number of sentinels of such a vocabulary.
    of_bytes: bool = False  # Whether pieces consist of bytes, and so cover every script.
    _added: Mapping[str, AddedToken] = {}  # Added tokens by their spelling.

    @functools.cached_property
    @abc.abstractmethod
    def pieces(self) -> tuple[str, ...]:
        """Every piece, by id; an empty string for an id without one."""

    def _encode(self, text: str) -> Sequence[int]:
        """The pieces of a text, or of a part of one."""
        raise NotImplementedError

    @abc.abstractmethod
    def _text(self, tokens: list[int], special: bool) -> str:
        """The text of tokens that do not end it, without those that stand for no text."""

    @functools.cached_property
    def spelled(self) -> list[bytes | None]:
        """Each token's text in UTF-8; None for padding and other tokens without text.

        The text of an added token is its spelling. This form is the same in all kinds of
        vocabulary, so that tokens of different ones can be compared.
        """
        added = {token.id: token.content.encode() for token in self._given}
        added |= {token.id: token.content.encode() for token in self._added.values()}
        return [added.get(i) or self._stands_for(piece) for i, piece in enumerate(self.pieces)]

    def _stands_for(self, piece: str) -> bytes | None:
        """The text of a piece, here of SentencePiece or bytes; None if it stands for no text."""
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode() or None

    def last_piece(self, spelled: bytes) -> int:
        """The last token of a UTF-8 text, which may end within a character."""
        tokens = self._encode(spelled.decode(errors="ignore"))
        return int(tokens[-1]) if len(tokens) else self.start_id

    def encode(self, text: str) -> np.ndarray:
        """Tokens [length] of a text and the end of sequence, int32."""
        return np.array([*self._tokens(text), self.end_id], np.int32)

    def decode(self, tokens: np.ndarray | list[int], special: bool = False) -> str:
        """The text of tokens, up to the end of sequence, with special ones if requested."""
        before_end = itertools.takewhile(lambda token: token not in self.eos_ids, map(int, tokens))
        return self._text(list(before_end), special)

    def before(self, stop: Sequence[str], tokens: list[int], special: bool = False) -> str | None:
        """The text of tokens before the first stop string in it; None if it has none.

        A stop string may contain special tokens, whether the text shows them or not.
        """
        text = self.decode(tokens, special)
        if places := [place for one in stop if (place := text.find(one)) >= 0]:
            return text[: min(places)]
        whole = self.decode(tokens, special=True)
        places = [place for one in stop if (place := whole.find(one)) >= 0]
        if special or not places:
            return None
        count = 0  # Tokens that end before the place.
        while len(self.decode(tokens[: count + 1], special=True)) <= min(places):
            count += 1
        shown = self.decode(tokens[:count])
        if not self.decode(tokens[count : count + 1]):
            return shown
        return shown + whole[len(self.decode(tokens[:count], special=True)) : min(places)]

    def prompt(self, text: str) -> np.ndarray:
        """The tokens that a decoder-only model continues: the start token and the text's, int32.

        For a `Rendered` text they are only the tokens that it spells out.
        """
        before = [] if isinstance(text, Rendered) else [self.start_id]
        return np.array([*before, *self._tokens(text)], np.int32)

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = []
        for part in split(text, self._spellings, self._added):
            tokens += [part.id] if isinstance(part, AddedToken) else self._encode(part)
        return tokens

    @property
    def _given(self) -> Iterable[AddedToken]:
        """Added tokens other than the usual sentinels."""
        return self.special.added

    @functools.cached_property
    def _spellings(self) -> re.Pattern[str] | None:
        return pattern(self._added.values())

    def _adopt(self, special: SpecialTokens, known: Callable[[str], int | None], end: int) -> None:
        """Applies a checkpoint's settings; `known` gives a piece's id, `end` is the usual end.

        ValueError is raised for an end that is not a token.
        """
        sentinels = [AddedToken(one, i, special=True) for i, one in self._sentinels()]
        ids = [(one, known(one)) for one in special.spelled]
        spelled = [AddedToken(one, i, special=True) for one, i in ids if i is not None]
        listed = [*sentinels, *spelled, *special.added]
        self._added = {token.content: token for token in listed}
        self.special = special
        self.size = max([self.size, *(token.id + 1 for token in listed)])
        self.end_id = end
        if special.end is not None:
            named = self._added.get(special.end)
            end_id = named.id if named else known(special.end)
            if end_id is None:
                raise ValueError(
                    f"The end {special.end!r} of texts is no piece of the vocabulary {self.path}; "
                    "give it its id among the added tokens, or name another (eos_token)."
                )
            self.end_id = end_id
        self.eos_ids = special.eos_ids or (self.end_id,)
        if special.start_id is not None:
            self.start_id = special.start_id
        for token in self.eos_ids:
            if token >= self.size:
                raise ValueError(
                    f"The end token {token} lies outside the vocabulary {self.path}, whose last "
                    f"token is {self.size - 1}; correct the eos_token_id of the checkpoint."
                )

    def _sentinels(self) -> Iterator[tuple[int, str]]:
        """The sentinels' ids and spellings."""
        yield from ()

    def _listed(self, known: Iterable[str]) -> tuple[str, ...]:
        """Every token, by id: the pieces and the added tokens."""
        pieces = [*known]
        pieces += [""] * (self.size - len(pieces))
        for token in self._added.values():
            pieces[token.id] = token.content
        return tuple(pieces)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the pieces, in hexadecimal."""
        return hashlib.sha256("\0".join(self.pieces).encode()).hexdigest()

    @functools.cached_property
    def contents(self) -> str:
        """The fingerprint of its size and files, which hold scores and merges, or of its pieces.

        See `fingerprints.of_files`.
        """
        files = [self.path, *([self.path.with_name(MERGES)] if self.path.name == PAIRS else [])]
        there = {str(i): file for i, file in enumerate(files) if file.is_file()}
        read = fingerprints.of_files(there) if there else self.fingerprint
        return fingerprints.of_value([self.size, read])

    def spelled_out(self, text: str) -> float:
        """The share, 0 to 1, of a text's characters that no piece has, as in another script.

        They are unknown or spelled in bytes. The share of tokens would be smaller where a run of
        unknown characters is one token, as in T5's vocabulary.
        """
        if self.of_bytes:
            return 0.0
        # Unknown pieces and single bytes decode to these.
        marks = {"\N{REPLACEMENT CHARACTER}", "\N{DOUBLE QUESTION MARK}"}
        whole = [token for token in self.encode(text) if marks.isdisjoint(self.decode([token]))]
        kept, full = ("".join(words.split()) for words in (self.decode(whole), text))
        # One character may be normalised to several, as in a ligature.
        return max(0.0, 1 - len(kept) / len(full)) if full else 0.0

    def require_room(self, rows: int, model: str) -> None:
        """Raises ValueError if it has more pieces than a model's embedding has rows."""
        for token in self._given:
            if token.id >= rows:
                raise ValueError(
                    f"The added token {token.content!r} of {self.path} has the id {token.id}, but "
                    f"{model} has {rows} embeddings; give it a row (resize_token_embeddings), or "
                    "take the token out of the tokenizer's files."
                )
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
