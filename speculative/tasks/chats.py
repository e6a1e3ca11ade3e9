"""Chats as the texts of a task: lines of JSON with `messages`, or questions with `turns`.

Questions are as in Spec-Bench (arXiv 2401.07851) and SPEED-Bench: a user's messages in turn, each
after the answer of the model that is measured.
"""

import json
from collections.abc import Mapping
from typing import Any

from speculative import checks
from speculative.chat import Message, checked

# The fields of a question, from both benchmarks, and of a user's own chat.
QUESTION = ("question_id", "category", "sub_category", "turns", "reference")
QUESTION += ("source", "src_id", "difficulty", "multiturn")
CHAT = ("messages", "reference", "category", "question_id")


def is_chat(record: Mapping[str, Any]) -> bool:
    """Whether an object is a chat or a question."""
    return "messages" in record or "turns" in record


def of_record(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The fields of a `Prompt` for each turn of a chat; ValueError names `where` if it is no chat.

    A turn's messages are all those of the chat up to it. If one user message follows another, the
    answer to the earlier one is still to be written.
    """
    question = "turns" in record
    known = QUESTION if question else CHAT
    for name in record:
        if name not in known:
            kind = "a question" if question else "a chat"
            raise ValueError(f"{where} has {name!r}; the fields of {kind} are {', '.join(known)}.")
    named = {}
    for name in ("category", "question_id"):
        if not isinstance(value := record.get(name, ""), str | int):
            raise ValueError(f"{where} has {value!r} as {name}; give a text or a number.")
        named[name] = str(value)
    references = record.get("reference") or []
    references = references if isinstance(references, list) else [references]
    if not all(isinstance(one, str) for one in references):
        raise ValueError(f"{where} has {json.dumps(references)} as reference; give texts.")
    try:
        turns = _turns(record["turns"]) if question else [checked(record["messages"])]
    except ValueError as error:
        raise ValueError(f"{where} is no chat: {error}") from error
    history: list[Message] = []
    prompts = []
    for number, messages in enumerate(turns):
        history += messages
        if history[-1]["role"] != "user":
            raise ValueError(f"{where} must end with what a user says, to be answered.")
        reference = references[number] if number < len(references) else ""
        source, so_far = history[-1]["content"], tuple(history)
        of_turn = {"source": source, "reference": reference, "messages": so_far}
        prompts.append(of_turn | {"category": named["category"], "question": named["question_id"]})
    return prompts


def _turns(turns: Any) -> list[list[dict[str, Any]]]:
    """The user's text in each turn, as messages."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"turns must be a list of at least one text, not {turns!r}.")
    texts = [checks.text(f"turn {number}", text) for number, text in enumerate(turns, 1)]
    return [[{"role": "user", "content": text}] for text in texts]
