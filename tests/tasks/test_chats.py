"""Chats and questions as texts of a task: what their lines say, and what is wrong with them."""

import json
import pathlib
from typing import Any

import pytest

from speculative.tasks import Task
from speculative.tasks.prompts import fingerprint, load_prompts

USER = {"role": "user", "content": "Hi"}


def written(folder: pathlib.Path, *lines: dict[str, Any]) -> Task:
    file = folder / "question.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Task("mine", data=str(file))


def test_a_turn_of_a_question_is_a_prompt_after_those_before_it(tmp_path: pathlib.Path) -> None:
    """With all that Spec-Bench's and SPEED-Bench's files say."""
    of_spec_bench = {"question_id": 81, "category": "writing", "turns": ["a", "b"]}
    of_speed_bench = {
        "question_id": "x", "category": "math", "sub_category": "", "turns": ["1 + 1?"],
        "reference": ["2"], "source": "s", "src_id": "", "difficulty": "", "multiturn": False,
    }  # fmt: skip
    first, second, third = load_prompts(written(tmp_path, of_spec_bench, of_speed_bench))
    said = [{"role": "user", "content": text} for text in "ab"]
    assert (first.source, first.messages) == ("a", (said[0],))
    assert (second.source, second.messages) == ("b", tuple(said))
    assert first.category == second.category == "writing"
    assert first.question == second.question == "81"
    assert (third.source, third.reference, third.question) == ("1 + 1?", "2", "x")
    assert third.place.startswith("Line 2 of ")


def test_a_chat_is_a_prompt(tmp_path: pathlib.Path) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Go"}]
    (one,) = load_prompts(written(tmp_path, {"messages": messages, "reference": "went"}))
    assert (one.source, one.reference, [*one.messages]) == ("Go", "went", messages)
    (other,) = load_prompts(written(tmp_path, {"messages": messages[2:], "reference": "went"}))
    assert fingerprint([one]) != fingerprint([other])


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ({"turns": ["a"], "answer": "b"}, "has 'answer'; the fields of a question are question_id"),
        ({"messages": [USER], "turn": 1}, "has 'turn'; the fields of a chat are messages"),
        ({"turns": []}, "turns must be a list of at least one text"),
        ({"turns": ["a", 1]}, "turn 2 must be of type str, not 1"),
        ({"messages": []}, "messages must be a list of at least one"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "end with what a user says"),
        ({"turns": ["a"], "category": ["b"]}, r"has \['b'\] as category"),
        ({"turns": ["a"], "reference": [1]}, r"has \[1\] as reference"),
        ({"source": "a", "reference": "b"}, "neither messages nor turns"),
    ],
)
def test_what_is_no_question(tmp_path: pathlib.Path, line: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError, match=f"^Line 2 of .*{fragment}"):
        load_prompts(written(tmp_path, {"turns": ["a"]}, line))


def test_the_shipped_questions() -> None:
    prompts = load_prompts("questions")
    questions = {one.question: one.category for one in prompts}
    counts = {name: list(questions.values()).count(name) for name in questions.values()}
    assert counts == dict.fromkeys(
        ["talk", "writing", "reasoning", "math", "code", "retrieval", "summary", "translation"], 10
    )
