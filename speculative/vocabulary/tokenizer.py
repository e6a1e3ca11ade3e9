"""Vocabularies that the library tokenizers reads."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from speculative.disk import reading
from speculative.special_tokens import AddedToken, SpecialTokens
from speculative.vocabulary.base import (
    END_OF_TEXT,
    MERGES,
    PAIRS,
    Rendered,
    Vocabulary,
)


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
        self._tokenizer = read_file(self.path, special)
        added = self._tokenizer.get_added_tokens_decoder()
        if rows is not None and special.pad is not None:
            beyond = [i for i, token in added.items() if i >= rows and token.content == special.pad]
            if beyond:  # It is never read or written.
                self._tokenizer = read_file(self.path, special, without=beyond[0])
        self.of_bytes = type(self._tokenizer.decoder).__name__ == "ByteLevel"
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocabulary.values(), default=-1)
        known, end = self._tokenizer.token_to_id, special.end
        if end is None:
            end = END_OF_TEXT if self.of_bytes or known("</s>") is None else "</s>"
        if (ends := known(end)) is None and not special.eos_ids:
            raise ValueError(
                f"{self.path} is neither of GPT-2's kind nor of T5's: it has no piece {end}."
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
        """The tokens that the file puts before a text, and the text's own, int32.

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


def read_file(path: pathlib.Path, special: SpecialTokens, without: int | None = None) -> Any:
    """A file as an object of the library tokenizers, optionally without one added token.

    Raises:
        ValueError: the file is missing or damaged.
    """
    import tokenizers

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
