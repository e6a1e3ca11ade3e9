"""What is drawn, and how it is scored, for the record of sampled texts."""

import pathlib
from typing import Any

import pytest

import speculative
from benchmarks.sampled_texts import compared, drawn, show
from speculative.measurement.quality import difference, measure
from speculative.tasks.prompts import Prompt
from tests.printed import printed

PROMPTS = [
    Prompt("summarize: a library for reading old files", "library for old files"),
    Prompt("summarize: draws maps of the night sky", "maps of the sky"),
]


def test_samples_are_those_of_each_prompt(saved_pair: tuple[pathlib.Path, pathlib.Path]) -> None:
    pair = speculative.load(*saved_pair)
    given: dict[str, Any] = {"gamma": 2, "temperature": 1.0, "max_length": 6, "seed": 3}
    asked = pair.requests([prompt.source for prompt in PROMPTS], speculative.Settings(**given))
    expected = [
        sample
        for i, prompt in enumerate(PROMPTS)
        for sample in pair.samples(prompt.source, 3, example=i, **given)
    ]
    assert drawn(pair, asked, 3) == expected


def test_a_score_is_set_beside_that_of_the_target_alone() -> None:
    alone = ["library of files", "old files", "maps", "the night sky"]
    texts = ["library for old files", "a library", "maps of the sky", "sky"]
    found = compared("rougeL", PROMPTS, alone, texts, seed=0)
    references = [PROMPTS[i].reference for i in (0, 0, 1, 1)]
    score, own = (measure("rougeL", references, each) for each in (texts, alone))
    assert found["score"] == score
    assert found["above_alone"][0] == pytest.approx(score - own)
    expected, other = (
        difference("rougeL", references, alone, texts, 0, numbers)
        for numbers in ([0, 0, 1, 1], range(4))
    )
    assert found["above_alone"] == expected != other


def test_a_fault_is_shown() -> None:
    """Of texts with a token that the target never says nothing else is tested."""
    audit = {"texts": 4, "tests": [], "passed": False}
    row = {"row": "a_hidden_t1", "way": "token", "tokens_per_call": 2, "audit": audit}
    assert printed(show, [row]).split()[-2:] == ["–", "FAILED"]
