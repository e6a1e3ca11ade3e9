"""Chats: messages that a model's own template makes a prompt of."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from speculative import checks
from speculative.special_tokens import SpecialTokens
from speculative.vocabulary import Rendered

Message = Mapping[str, Any]
"""Of a chat, as others write it: its `role`, mostly system, user or assistant, and `content`."""

ITERATIONS = 100_000  # That loops over numbers may have together.


@dataclasses.dataclass(frozen=True)
class Template:
    """A Jinja template, and the spellings of special tokens that it may name."""

    source: str
    model: str  # Whose it is, for messages.
    begin: str = ""
    end: str = ""
    pad: str = ""

    def __call__(self, messages: Sequence[Message], goes_on: bool = True) -> Rendered:
        """The prompt of messages, up to where the answer begins if it `goes_on`.

        ValueError is raised if they are no messages, or the template does not take them.
        """
        given = checked(messages)
        names = {"bos_token": self.begin, "eos_token": self.end, "pad_token": self.pad}
        try:
            compiled = _environment().from_string(self.source)
            found = compiled.render(messages=given, add_generation_prompt=goes_on, **names)
        except Exception as error:  # Templates are programs, which may fail in any way.
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"The chat template of {self.model} cannot be used with these messages: {said}. "
                "Change them, or give the prompt as a text of its own (without --chat)."
            ) from error
        return Rendered(found)


def template(special: SpecialTokens, model: str) -> Template:
    """The template of a model; ValueError if it has none."""
    if special.template is None:
        raise ValueError(
            f"{model} has no chat template: it is no model for chats, or its folder lacks "
            "chat_template.jinja and the chat_template of tokenizer_config.json; give prompts as "
            "texts (without --chat)."
        )
    spelled = special.begin or "", special.end or "", special.pad or ""
    return Template(special.template, model, *spelled)


def checked(messages: Any) -> list[dict[str, Any]]:
    """Messages that are such; ValueError says which is none."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of at least one, not {messages!r}.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"Message {number} must be an object with role and content.")
        checks.text(f"The content of message {number}", message.get("content"))
    return [dict(message) for message in messages]


@functools.cache
def _environment() -> Any:
    """What templates are run in: as in transformers, but loops over numbers come to an end."""
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ModuleNotFoundError as error:
        raise ValueError("To run chat templates, install jinja2: pip install jinja2.") from error

    class Generation(ext.Extension):
        """``{% generation %}`` marks what an assistant wrote, which changes no text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        left = 0

        def from_string(self, *given: Any, **more: Any) -> Any:
            self.left = ITERATIONS
            return super().from_string(*given, **more)

    made = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )

    def numbers(*given: int) -> range:
        found = range(*given)
        made.left -= len(found)
        if made.left < 0:
            raise ValueError(f"its loops take more than {ITERATIONS:,} turns")
        return found

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **more)

    now = lambda form: datetime.datetime.now().strftime(form)  # noqa: E731
    made.globals |= {"range": numbers, "raise_exception": refuse, "strftime_now": now}
    made.filters["tojson"] = to_json
    return made
