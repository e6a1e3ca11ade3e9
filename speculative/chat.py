"""Chats: messages, rendered as a prompt by the model's own template."""

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
"""A chat message in the usual form: `role` (mostly system, user or assistant) and `content`."""

ITERATIONS = 100_000  # The most iterations of all loops over numbers in a template.


@dataclasses.dataclass(frozen=True)
class Template:
    """A Jinja template, and the spellings of the special tokens that it may use."""

    source: str
    model: str  # The model's name, for error messages.
    begin: str = ""
    end: str = ""
    pad: str = ""

    def __call__(self, messages: Sequence[Message], goes_on: bool = True) -> Rendered:
        """Renders messages as a prompt, including the start of the answer's turn if it `goes_on`.

        ValueError is raised if the messages are malformed or the template rejects them.
        """
        valid = checked(messages)
        names = {"bos_token": self.begin, "eos_token": self.end, "pad_token": self.pad}
        try:
            compiled = _environment().from_string(self.source)
            rendered = compiled.render(messages=valid, add_generation_prompt=goes_on, **names)
        except Exception as error:  # Templates are programs, which may fail in any way.
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"The chat template of {self.model} cannot be used with these messages: {reason}. "
                "Change them, or give the prompt as plain text (without --chat)."
            ) from error
        return Rendered(rendered)


def template(special: SpecialTokens, model: str) -> Template:
    """The template of a model; ValueError if it has none."""
    if special.template is None:
        raise ValueError(
            f"{model} has no chat template: it is not a chat model, or its folder lacks "
            "chat_template.jinja and the chat_template of tokenizer_config.json; give prompts as "
            "plain text (without --chat)."
        )
    spelled = special.begin or "", special.end or "", special.pad or ""
    return Template(special.template, model, *spelled)


def checked(messages: Any) -> list[dict[str, Any]]:
    """Copies well-formed messages as dicts; ValueError names the first malformed one."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of at least one, not {messages!r}.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"Message {number} must be an object with role and content.")
        checks.text(f"The content of message {number}", message.get("content"))
    return [dict(message) for message in messages]


@functools.cache
def _environment() -> Any:
    """The environment of templates: as in transformers, but loops over numbers are limited."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """``{% generation %}`` marks the assistant's text; it does not change the output."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        left = 0

        def from_string(self, *args: Any, **kwargs: Any) -> Any:
            self.left = ITERATIONS
            return super().from_string(*args, **kwargs)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )

    def numbers(*bounds: int) -> range:
        span = range(*bounds)
        environment.left -= len(span)
        if environment.left < 0:
            raise ValueError(f"its loops take more than {ITERATIONS:,} iterations")
        return span

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **more)

    now = lambda form: datetime.datetime.now().strftime(form)  # noqa: E731
    environment.globals |= {"range": numbers, "raise_exception": refuse, "strftime_now": now}
    environment.filters["tojson"] = to_json
    return environment
