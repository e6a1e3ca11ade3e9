"""Chats as the texts of a task: lines of JSON with `messages`, or questions with `turns`.

Questions are as Spec-Bench (arXiv 2401.07851) and SPEED-Bench have them: what a user says in turn,
each after the answer of the model that is measured.
"""

import json
from collections.abc import Mapping
from typing import Any

from speculative import checks
from speculative.chat import Message, checked

# Of a question, those of both benchmarks; of a chat of one's own.
QUESTION = ("question_id", "category", "sub_category", "turns", "reference")
QUESTION += ("source", "src_id", "difficulty", "multiturn")
CHAT = ("messages", "reference", "category", "question_id")


def is_chat(record: Mapping[str, Any]) -> bool:
    """Whether an object is a chat or a question."""
    return "messages" in record or "turns" in record


def of_record(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The fields of a `Prompt` for each turn of a chat; ValueError says where, if it is none.

    The messages of a turn are all up to it. Where one of the user's follows another, the answer to
    that one is still to be written.
    """
    question = "turns" in record
    known = QUESTION if question else CHAT
    for name in record:
        if name not in known:
            kind = "a question" if question else "a chat"
            raise ValueError(f"{where} has {name!r}, which {kind} has not: {', '.join(known)}.")
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
    said: list[Message] = []
    found = []
    for number, messages in enumerate(turns):
        said += messages
        if said[-1]["role"] != "user":
            raise ValueError(f"{where} must end with what a user says, to be answered.")
        reference = references[number] if number < len(references) else ""
        of_turn = {"source": said[-1]["content"], "reference": reference, "messages": tuple(said)}
        found.append(of_turn | {"category": named["category"], "question": named["question_id"]})
    return found


def _turns(given: Any) -> list[list[dict[str, Any]]]:
    """What a user says in each turn, as messages."""
    if not isinstance(given, list) or not given:
        raise ValueError(f"turns must be a list of at least one text, not {given!r}.")
    texts = [checks.text(f"turn {number}", text) for number, text in enumerate(given, 1)]
    return [[{"role": "user", "content": text}] for text in texts]
