"""Chats as a row's texts, turn by turn; and what is measured of them by category."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import speculative
from speculative.chat import template
from speculative.checkpoints import native
from speculative.cli import main
from speculative.rows import chats, records
from speculative.rows.categories import OVERALL, by_category
from speculative.rows.config import RowConfig
from speculative.rows.kept import Example, read
from speculative.special_tokens import SpecialTokens
from speculative.tasks.prompts import Prompt
from tests import saved
from tests.test_chat import SOURCE

QUESTIONS = (
    '{"question_id": 1, "category": "talk", "turns": ["Hi", "And you?", "Why?"]}\n'
    '{"question_id": 2, "category": "code", "turns": ["def f(): pass"]}\n'
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small random model with a template, and questions."""
    made = tmp_path_factory.mktemp("chats")
    special = SpecialTokens(eos_ids=(1,), template=SOURCE)
    params = saved.random(saved.GPT, 0)
    native.save(made / "target", saved.GPT, params, saved.VOCABULARY, special=special)
    (made / "questions.jsonl").write_text(QUESTIONS)
    return made


def row(prefix: str = "", **settings: Any) -> RowConfig:
    given = {"temperature": 0.0, "max_length": 8} | settings
    return RowConfig(task="mine", prefix=prefix, target="t", draft="copy", **given)


def test_turns_follow_the_target_s_own_answers(folder: pathlib.Path) -> None:
    pair = speculative.load(folder / "target", "copy")
    texts = ["Hi", "And you?", "Why?"]
    prompts = [
        Prompt(text, "", messages=tuple(map(user, texts[: n + 1]))) for n, text in enumerate(texts)
    ]
    prompts.append(Prompt("x", "", messages=({"role": "system", "content": "Be"}, user("x"))))
    config = row(temperature=1.0, seed=3)
    before = chats.rendered(prompts, config, pair.vocabulary.special)
    assert [one.source for one in before[1:3]] == texts[1:]
    found = chats.answered(pair, config, before)
    of_target, said = template(pair.vocabulary.special, "t"), []
    for one, text in zip(found, texts, strict=False):
        said.append(user(text))
        assert one.source == of_target(said)
        # Each answer is the first sample of its prompt: nothing else was asked at that turn.
        answer = pair.generate(one.source, gamma=0, temperature=1.0, max_length=8, seed=3)
        said.append({"role": "assistant", "content": answer.text})
    assert found[3].source == of_target(prompts[3].messages)
    with pytest.raises(ValueError, match="turns after answers"):
        chats.require_whole(before)


def test_without_a_template_what_is_said_first_is_read() -> None:
    turns = user("a"), user("b")
    prompts = [Prompt("a", "", messages=turns[:1]), Prompt("b", "", messages=turns)]
    (one,) = chats.rendered(prompts, row("answer: "), SpecialTokens())
    assert (one.source, one.prefix) == ("answer: a", "answer: ")


def test_a_template_that_fails_names_the_line() -> None:
    prompt = Prompt("a", "", place="Line 7 of f", messages=({"role": "tool", "content": "a"},))
    with pytest.raises(ValueError, match="^Line 7 of f: The chat template of t cannot"):
        chats.rendered([prompt], row(), SpecialTokens(template=SOURCE))


def example(number: int, category: str, question: str, lengths: int, seconds: float) -> Example:
    return Example(
        number=number, source="", reference="", autoregressive="", speculative="",
        lengths=(lengths, lengths), seconds=(2.0, seconds), target_calls=lengths // 2, tested=5,
        accepted=3, betas=[], difference=None, tested_by_position=[3, 2, 0],
        accepted_by_position=[2, 1, 0], category=category, question=question,
    )  # fmt: skip


def test_measures_are_means_over_questions() -> None:
    """By hand: of a question, all turns are summed; of a category, its questions are averaged."""
    examples = [
        example(0, "a", "1", 10, 1.0),
        example(1, "a", "1", 30, 1.0),  # 40 tokens in 2 s, alone in 4.
        example(2, "a", "2", 60, 0.5),  # 60 in .5 s, alone in 2.
        example(3, "b", "3", 20, 4.0),
    ]
    a, b, overall = by_category(examples, 0) or []
    assert [one.category for one in (a, b, overall)] == ["a", "b", OVERALL]
    assert (a.questions, a.tokens, overall.questions) == (2, 100, 3)
    assert a.mean_accepted_tokens == 100 / 50
    assert a.tokens_per_second == (20 + 120) / 2
    assert a.tokens_per_second_autoregressive == (10 + 30) / 2
    assert a.speedup == 70 / 20
    assert a.speedup_low == 2 and a.speedup_high == 4  # Of two questions, the extremes.
    assert (b.speedup, b.tokens_per_second) == (0.5, 5)
    np.testing.assert_allclose(overall.speedup, (20 + 120 + 5) / (10 + 30 + 10))
    assert overall.tested_by_position == [12, 8, 0]
    assert overall.acceptance_by_position == [8 / 12, 0.5, None]
    assert by_category([dataclasses.replace(examples[0], category="")], 0) is None


def test_a_row_of_questions(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the file to the record, the terminal and the page."""
    results = folder / "results"
    options = ["--target", str(folder / "target"), "--draft", "copy", "--gamma=2", "--seed=1"]
    options += ["--data_file", str(folder / "questions.jsonl"), "--max_length=8"]
    assert main(["run", *options, "--output_dir", str(results)]) == 0
    out = capsys.readouterr().out
    (record,) = records.read(results / "records.jsonl")
    assert record.num_examples == record.outputs_identical == 4
    found = {one.category: one for one in record.categories or ()}
    assert {name: one.questions for name, one in found.items()} == {
        "code": 1,
        "talk": 1,
        OVERALL: 2,
    }
    examples = read(results / "rows" / record.experiment)
    talk = [one for one in examples if one.category == "talk"]
    assert found["talk"].tokens == sum(one.lengths[1] for one in talk) and len(talk) == 3
    assert "[user1]Hi[assistant1]" in talk[1].source and "[user3]Why?" in talk[2].source
    assert "by category:\ncategory questions accepted by position" in out
    text = (results / "report.html").read_text()
    assert "<h2>Categories</h2>" in text and '<th scope="row">talk</th>' in text
