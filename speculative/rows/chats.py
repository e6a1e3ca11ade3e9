"""Renders a task's chats by the target's template, with its own answers between turns."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence

from absl import logging

from speculative.chat import Message, Template, template
from speculative.pair import Pair
from speculative.rows.config import RowConfig
from speculative.settings import Settings
from speculative.special_tokens import SpecialTokens
from speculative.tasks.prompts import Prompt

Messages = Sequence[Message]


def rendered(prompts: Sequence[Prompt], config: RowConfig, special: SpecialTokens) -> list[Prompt]:
    """Renders prompts as texts for the row's target, except those that follow missing answers.

    Without a template, each chat is reduced to the user's first message after the task's prefix; a
    warning counts the turns that are left out. ValueError names the place of a chat that the
    template rejects.
    """
    if not any(one.messages for one in prompts):
        return list(prompts)
    if special.template is None:
        kept = [one for one in prompts if len(one.messages) <= 1]
        if len(kept) < len(prompts):
            logging.warning(
                "%s has no chat template: of %d prompts, %d that are not the beginning of a chat "
                "are left out.", config.target, len(prompts), len(prompts) - len(kept),
            )  # fmt: skip
        prefix = config.texts.prefix
        return [
            dataclasses.replace(one, source=prefix + one.source, prefix=prefix)
            if one.messages
            else one
            for one in kept
        ]
    of_target, texts = template(special, config.target), []
    for one in prompts:
        messages, complete = _so_far(one.messages, {})
        if one.messages and complete:
            one = _as_text(one, messages, of_target)
        texts.append(one)
    return texts


def answered(pair: Pair, config: RowConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Renders the prompts that follow answers, which the target writes without a draft.

    Answers use the row's settings. Both ways of decoding thus see the same text at each turn.
    """
    lacking = [one for one in prompts if not _so_far(one.messages, {})[1]]
    if not lacking:
        return list(prompts)
    of_target, answers = template(pair.vocabulary.special, pair.names[0]), dict[str, str]()
    names = ("temperature", "top_k", "top_p", "min_p", "max_length", "seed", "source_length")
    settings = Settings(gamma=0, **{name: getattr(config, name) for name in names})
    while waiting := [chat for one in lacking if not (chat := _so_far(one.messages, answers))[1]]:
        by_name = {json.dumps(messages): messages for messages, _ in waiting}
        requests = pair.requests([*map(of_target, by_name.values())], settings)
        results = pair.decode_all(requests, batch_size=config.batch_size)
        answers |= {name: one.text for name, one in zip(by_name, results, strict=True)}
    return [
        _as_text(one, _so_far(one.messages, answers)[0], of_target) if one in lacking else one
        for one in prompts
    ]


def require_whole(prompts: Sequence[Prompt]) -> None:
    """Raises ValueError, naming the place, if a prompt follows answers that do not exist yet."""
    for one in prompts:
        if not _so_far(one.messages, {})[1]:
            raise ValueError(
                f"{one.place} has turns after answers that the target has yet to write, which only "
                "run, table and tune support; leave them out here."
            )


def _so_far(messages: Messages, answers: Mapping[str, str]) -> tuple[list[Message], bool]:
    """A chat up to the first message without an answer, and whether all answers exist."""
    chat: list[Message] = []
    for message, following in itertools.zip_longest(messages, messages[1:]):
        chat.append(message)
        if following and message["role"] == following["role"] == "user":
            if (answer := answers.get(json.dumps(chat))) is None:
                return chat, False
            chat.append({"role": "assistant", "content": answer})
    return chat, True


def _as_text(prompt: Prompt, messages: Messages, of_target: Template) -> Prompt:
    try:
        return dataclasses.replace(prompt, source=of_target(messages))
    except ValueError as error:
        raise ValueError(f"{prompt.place}: {error}") from error
