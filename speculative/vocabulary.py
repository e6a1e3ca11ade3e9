"""Vocabularies: SentencePiece and bytes, as in T5s, and those of the library tokenizers."""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece

from speculative import fingerprints
from speculative.disk import reading
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

        The text of an added token is its spelling. It is the same in every kind of vocabulary.
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
        """The last token of a text, which may be a part of a character."""
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


class Tokenizer(Vocabulary):
    """A vocabulary read by the library `tokenizers`: T5's pieces, or byte pairs.

    A `tokenizer.json` may hold either; the older `vocab.json` with its `merges.txt` holds GPT-2's
    byte pairs, with one token between texts (Radford et al., 2019).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        special: SpecialTokens = SpecialTokens(),  # noqa: B008
        rows: int | None = None,
    ):
        """Loads the files; a padding token beyond the model's `rows`, if known, is left out.

        ValueError is raised if a file is missing or damaged, or no token ends a text.
        """
        self.path = pathlib.Path(path)
        self._tokenizer = _tokenizer(self.path, special)
        added = self._tokenizer.get_added_tokens_decoder()
        if rows is not None and special.pad is not None:
            beyond = [i for i, token in added.items() if i >= rows and token.content == special.pad]
            if beyond:  # It is never read or written.
                self._tokenizer = _tokenizer(self.path, special, without=beyond[0])
        self.of_bytes = type(self._tokenizer.decoder).__name__ == "ByteLevel"
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocabulary.values(), default=-1)
        known, end = self._tokenizer.token_to_id, special.end
        if end is None:
            end = END_OF_TEXT if self.of_bytes or known("</s>") is None else "</s>"
        if (ends := known(end)) is None and not special.eos_ids:
            raise ValueError(
                f"{self.path} is not of GPT-2's kind, nor of T5's: it has no piece {end}."
            )
        ends = special.eos_ids[0] if ends is None else ends
        # The library itself finds those of its file.
        others = tuple(one for one in special.added if known(one.content) != one.id)
        self._adopt(dataclasses.replace(special, added=others, spelled=(), end=None), known, ends)
        self.special = special
        if self.of_bytes and special.start_id is None:
            self.start_id = ends

    @property
    def _given(self) -> Iterable[AddedToken]:
        own = self._tokenizer.get_added_tokens_decoder().items()
        return [*self.special.added, *(AddedToken(token.content, i) for i, token in own)]

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every piece, by id, with bytes spelled as GPT-2 spells them."""
        return self._listed(self._tokenizer.id_to_token(i) or "" for i in range(self.size))

    def _stands_for(self, piece: str) -> bytes | None:
        if not self.of_bytes:
            return super()._stands_for(piece)
        known = _bytes_by_character()
        return bytes(known[one] for one in piece) if piece and {*piece} <= known.keys() else None

    def _tokens(self, text: str) -> list[int]:
        if self._added:
            return super()._tokens(text)
        tokens = self._tokenizer.encode(text).ids  # The file may put tokens around a text.
        return tokens[:-1] if tokens[-1:] == [self.end_id] and not self.of_bytes else tokens

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> np.ndarray:
        """The text's tokens after those that the file puts before it, int32.

        Without any, pieces get the start token; byte pairs get it for an empty text only.
        """
        tokens = super()._tokens(text)
        if not isinstance(text, Rendered):
            before = self._before or ([] if self.of_bytes else [self.start_id])
            tokens = [*before, *tokens] or [self.start_id]
        return np.array(tokens, np.int32)

    @functools.cached_property
    def _before(self) -> list[int]:
        """The tokens that the file puts before a text."""
        sample = "a"
        own, whole = self._encode(sample), self._tokenizer.encode(sample).ids
        places = (i for i in range(len(whole)) if whole[i : i + len(own)] == own)
        return whole[: next(places, 0)]

    def _text(self, tokens: list[int], special: bool) -> str:
        text, kept = "", list[int]()
        named = {token.id: token for token in self._added.values()}
        for token in tokens:
            if token in named:
                if special or not named[token].special:
                    text += self._tokenizer.decode(kept, skip_special_tokens=not special)
                    text, kept = text + named[token].content, []
            elif 0 <= token < self.size:
                kept.append(token)
        return text + self._tokenizer.decode(kept, skip_special_tokens=not special)


@functools.cache
def _bytes_by_character() -> Mapping[str, int]:
    """GPT-2's spelling of bytes: printable ones as they are, others as characters from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    printed = {chr(byte): byte for byte in prints}
    return printed | {chr(256 + i): byte for i, byte in enumerate(others)}


def _tokenizer(path: pathlib.Path, special: SpecialTokens, without: int | None = None) -> Any:
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
    with reading(path, "is no vocabulary of byte pairs or pieces"):
        if path.name == PAIRS:
            vocabulary, pairs = tokenizers.models.BPE.read_file(str(path), str(merges))
            taken = set(vocabulary.values())
            added = [one for one in special.added if one.id not in taken]
            vocabulary = {one.content: one.id for one in added} | vocabulary
            tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = tokenizers.decoders.ByteLevel()
            for one in added:
                flags = {name: getattr(one, name) for name in AddedToken._fields[2:]}
                token = tokenizers.AddedToken(one.content, normalized=False, **flags)
                (tokenizer.add_special_tokens if one.special else tokenizer.add_tokens)([token])
            tokenizer.add_special_tokens([END_OF_TEXT])
        elif without is None:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        else:
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields["added_tokens"] = [x for x in fields["added_tokens"] if x["id"] != without]
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    # A file may set a length to which texts are cut or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    _tokenizer(path, special).save(str(folder / TOKENIZER))
    return TOKENIZER


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
