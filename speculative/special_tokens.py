"""A checkpoint's tokens in addition to pieces, and those that begin and end texts."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from speculative import checks
from speculative.types import Fields


class AddedToken(NamedTuple):
    """A token with a fixed spelling, which is found before a text is cut into pieces.

    The fields are those of the library `tokenizers`.
    """

    content: str  # The spelling.
    id: int
    special: bool = False  # Whether decoded text omits it unless requested.
    lstrip: bool = False  # Whether the spaces before it belong to it.
    rstrip: bool = False  # Whether the spaces after it belong to it.
    single_word: bool = False  # Whether it must be a whole word.


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """A checkpoint's settings of tokens; missing ones are as usual for its vocabulary.

    Attributes:
        eos_ids: the tokens each of which ends an output.
        start_id: the token before a text.
        pad_id: the token with which other programs pad texts.
        end: the spelling of the token that ends an encoded text.
        pad: the spelling of padding.
        added: tokens in addition to the vocabulary's pieces.
        spelled: pieces that are also special added tokens.
        begin: the spelling of the token before a text.
        template: the Jinja template that renders a chat as a prompt; see `chat.Template`.
    """

    eos_ids: tuple[int, ...] = ()
    start_id: int | None = None
    pad_id: int | None = None
    end: str | None = None
    pad: str | None = None
    added: tuple[AddedToken, ...] = ()
    spelled: tuple[str, ...] = ()
    begin: str | None = None
    template: str | None = None

    def to_json(self) -> Fields:
        """The settings that are not missing, as JSON-ready values."""
        fields = {name: value for name, value in vars(self).items() if value not in ((), None)}
        if self.added:
            fields["added"] = [token._asdict() for token in self.added]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_json(cls, fields: Fields) -> Self:
        """The inverse of `to_json`; raises ValueError for a field of the wrong type."""
        read: dict[str, Any] = dict(fields)
        if "added" in fields:
            read["added"] = tuple(added_token(token["id"], token) for token in fields["added"])
        for name in ("eos_ids", "spelled"):
            read[name] = tuple(fields.get(name, ()))
        for name in ("start_id", "pad_id"):
            if name in fields:
                token_id(name, fields[name])
        for token in read["eos_ids"]:
            token_id("eos_ids", token)
        return cls(**read)


def token_id(name: str, value: object) -> int:
    """Returns a token's number, which must be a whole number from 0; ValueError names it."""
    return checks.whole(name, value, 0, 2**31 - 1)


def added_token(number: object, fields: Fields) -> AddedToken:
    """An added token from a JSON object, as in `tokenizer.json`; ValueError without a spelling."""
    content = fields.get("content")
    if not isinstance(content, str) or not content:
        raise ValueError(f"The added token {number} has the content {content!r}, not a text.")
    flags = {name: bool(fields.get(name, False)) for name in AddedToken._fields[2:]}
    return AddedToken(content, token_id(f"The id of the added token {content!r}", number), **flags)


def pattern(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """A pattern of the added tokens, which finds the longest at each place; None without any."""
    spellings = {
        token.content: rf"\b{re.escape(token.content)}\b"
        if token.single_word
        else re.escape(token.content)
        for token in added
    }
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(spellings[one] for one in longest_first)) if spellings else None


def split(
    text: str, found: re.Pattern[str] | None, added: Mapping[str, AddedToken]
) -> Iterator[str | AddedToken]:
    """A text's added tokens, and the parts between them, in order; empty parts are left out."""
    begin, stripped = 0, False
    for match in found.finditer(text) if found else ():
        token = added[match.group()]
        before = text[begin : match.start()]
        before = before.lstrip() if stripped else before
        before = before.rstrip() if token.lstrip else before
        if before:
            yield before
        yield token
        begin, stripped = match.end(), token.rstrip
    if rest := text[begin:].lstrip() if stripped else text[begin:]:
        yield rest
