"""The prompts of `generate`: one, those of a file, or lines as they come.

Each line of a .jsonl file is a JSON object with a `prompt`, and may set its own settings.
"""

import argparse
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from speculative import checks, disk
from speculative.commands import OF_RUN, SETTINGS
from speculative.settings import Settings

if TYPE_CHECKING:
    from speculative.chat import Message, Template

INPUT = "standard input"
MARK = "> "  # Shown where a line is awaited.
# The settings that a line of JSON may have; all texts of a run share gamma and rule.
KNOWN = [
    name for name in SETTINGS if name not in {*OF_RUN, "gamma", "tree", "verification", "lenience"}
]


class Asked(NamedTuple):
    """A prompt, prefix included, and its settings."""

    text: str
    settings: Settings
    place: str = ""  # Its line, for error messages.
    messages: "tuple[Message, ...]" = ()  # A chat, in place of a text.


@dataclasses.dataclass
class Chats:
    """Renders messages as prompts; typed lines continue a chat of all messages so far."""

    template: "Template | None"  # None where prompts are texts.
    system: str | None
    keeps: bool  # Whether prompts continue one chat.
    history: "list[Message]" = dataclasses.field(default_factory=list)

    def prompt(self, asked: Asked) -> Asked:
        """Renders a prompt as a text; ValueError if the template does not take the messages."""
        from speculative.vocabulary import Rendered

        if self.template is None or isinstance(asked.text, Rendered):
            return asked
        new = [*asked.messages] or [{"role": "user", "content": asked.text}]
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = self.history + new if self.history else first + new
        rendered = asked._replace(text=self.template(messages))
        self.history = messages if self.keeps else []
        return rendered

    def answered(self, text: str) -> None:
        """Records the model's answer to the last prompt."""
        if self.keeps:
            self.history = [*self.history, {"role": "assistant", "content": text}]


def typed(options: argparse.Namespace) -> bool:
    """Whether prompts are typed on a terminal."""
    here = options.text is not None or options.file is not None
    return not here and sys.stdin is not None and sys.stdin.isatty()


def arriving(options: argparse.Namespace, prefix: str, settings: Settings) -> Iterator[list[Asked]]:
    """Yields the prompts that are there already, then waits for the next ones.

    A message counts the blank lines, which are left out. ValueError is raised if there is no
    prompt, or a line is not UTF-8, or not JSON where it should be. Someone who types sees only a
    message about a line that is not UTF-8, and none about blank lines or a lack of prompts.
    """
    by_hand, in_json = typed(options), str(options.file).endswith(".jsonl")
    if options.text is not None:
        origin = "the command line"
        chunks = iter([[checks.text("The prompt on the command line", options.text)]])
    elif options.file is not None:
        origin, chunks = options.file, iter([disk.lines(disk.text(options.file))])
    else:
        origin, chunks = INPUT, _lines(by_hand)
    count = blank = 0
    for lines in chunks:
        first = count + blank + 1
        placed = [
            ("" if options.text is not None else f"Line {number} of {origin}", line)
            for number, line in enumerate(lines, first)
            if line.strip()
        ]
        if in_json:
            prompts = [_read(line, place, prefix, settings) for place, line in placed]
        else:
            prompts = [Asked(prefix + line, settings, place) for place, line in placed]
        count, blank = count + len(prompts), blank + len(lines) - len(prompts)
        if prompts:
            yield prompts
    if by_hand:
        return
    if not count:
        raise ValueError(f"The prompt is missing: {origin} is empty; give a text to decode.")
    if blank:
        print(f"Blank lines of {origin} left out: {blank}.", file=sys.stderr)


def _read(line: str, place: str, prefix: str, settings: Settings) -> Asked:
    """A prompt and its settings, checked; a ValueError names the line."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object with a prompt, a text.")
        messages = ()
        if "messages" in fields:
            from speculative.chat import checked

            messages = tuple(checked(fields.pop("messages")))
        if bool(messages) == isinstance(fields.get("prompt"), str):
            raise ValueError("it must have either a prompt, a text, or messages, those of a chat.")
        text = fields.pop("prompt", "")
        if unknown := sorted(set(fields) - set(KNOWN)):
            known = ", ".join(KNOWN)
            raise ValueError(f"it has {unknown[0]!r}; known are prompt, messages, {known}.")
        settings = dataclasses.replace(settings, **fields)
        return Asked(prefix + text, settings, place, messages)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no prompt: {error}") from error


def _lines(by_hand: bool) -> Iterator[list[str]]:
    """The lines of standard input that have arrived."""
    number = 1
    for raw in _arrived(MARK if by_hand and sys.stderr.isatty() else ""):
        try:
            yield disk.lines(disk.text(INPUT, raw, number))
        except ValueError as error:
            if not by_hand:
                raise
            print(f"error: {disk.sentence(error)}", file=sys.stderr)
        number += raw.count(b"\n")


def _arrived(mark: str) -> Iterator[bytes]:
    """Whole lines of standard input, as soon as they are there; all at once if it is a file."""
    if sys.stdin is None:  # The parent process has closed it.
        return
    rest = b""
    stdin: Any = sys.stdin.buffer
    read = stdin.read if stat.S_ISREG(os.fstat(0).st_mode) else stdin.read1
    while data := _awaited(read, "" if rest else mark):  # A long line comes in parts.
        whole, end, rest = (rest + data).rpartition(b"\n")
        if end:
            yield whole + end
    if rest:
        yield rest


def _awaited(read: Callable[[], bytes], mark: str) -> bytes:
    """Reads the next input, empty at the end; a line break then follows the mark."""
    data = b""
    try:
        print(mark, end="", file=sys.stderr, flush=True)
        data = read()
    finally:  # Ctrl-D and Ctrl-C.
        if mark and not data:
            print(file=sys.stderr)
    return data
