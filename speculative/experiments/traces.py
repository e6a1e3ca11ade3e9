"""Figure 1 of the paper for a prompt: what each step of Algorithm 1 accepted and corrected."""

import dataclasses

import numpy as np
from rich.text import Text

from speculative.decoding import random_draws, reference
from speculative.decoding.reference import TraceStep
from speculative.pair import Pair, Result
from speculative.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Line:
    """One step as text.

    Attributes:
        accepted: guesses that stand.
        rejected: the first guess that does not; empty if all stand.
        corrected: the target's own token after them; empty if the output ended before.
        count: guesses that stand, of those the output had room for.
    """

    accepted: str
    rejected: str
    corrected: str
    count: int


@dataclasses.dataclass(frozen=True)
class PromptTrace:
    """A prompt decoded by the reference loop, and by the fast path from the same numbers.

    Attributes:
        source: the prompt, its task's prefix included.
        lines: the reference loop's steps.
        result: the fast path's output.
        same_tokens: whether both emitted the same tokens.
    """

    source: str
    lines: list[Line]
    result: Result
    same_tokens: bool


def trace(
    pair: Pair, source: str, gamma: int, temperature: float, max_length: int, seed: int
) -> PromptTrace:
    """Decodes a task's first source by both paths.

    Raises:
        ValueError: the source is empty or too long, or a setting is out of range.
    """
    config = pair.decoding(gamma=gamma, temperature=temperature, max_length=max_length)
    inputs = pair.encode(source)
    draws = random_draws(seed, np.array([0]), config.capacity)
    result = pair.result(pair.run(inputs, draws, config))
    steps = reference.generate(
        pair.target, pair.draft, pair.params, np.asarray(inputs)[0], np.asarray(draws)[0], config
    )
    lines = [line(step, pair.vocabulary) for step in steps.steps]
    return PromptTrace(source, lines, result, steps.tokens == result.tokens)


def line(step: TraceStep, vocabulary: Vocabulary) -> Line:
    """A step's tokens as text; one may end before all that was accepted is emitted."""
    accepted, corrected = step.emitted[: step.accepted], step.emitted[step.accepted :]
    rejected = step.guesses[step.accepted : step.accepted + 1] if corrected else []

    def text(tokens: list[int]) -> str:
        return "".join(vocabulary.pieces[token] for token in tokens).replace("▁", " ")

    return Line(text(accepted), text(rejected), text(corrected), len(accepted))


LEGEND = {
    "accepted": ("green", "", ""),
    "rejected": ("red strike", "[-", "-]"),
    "corrected": ("bold blue", "{+", "+}"),
}
"""How a part of a line shows: its style where there is colour, else the marks around it."""


def legend(coloured: bool) -> Text:
    """What colours or marks stand for."""
    words = {
        "accepted": "accepted guess",
        "rejected": "rejected guess",
        "corrected": "the target's own token",
    }
    return Text(", ").join(_part(part, words[part], coloured) for part in LEGEND)


def render(lines: list[Line], gamma: int, coloured: bool) -> Text:
    """A line a step: its number, how many of its guesses stand, and its tokens."""
    shown = []
    for number, step in enumerate(lines, 1):
        text = Text(f"{number:3}  {step.count}/{gamma} │")
        for part in LEGEND:
            text.append(_part(part, getattr(step, part), coloured))
        shown.append(text)
    return Text("\n").join(shown)


def _part(part: str, text: str, coloured: bool) -> Text:
    style, before, after = LEGEND[part]
    if coloured or not text:
        return Text(text, style)
    return Text(before + text + after)
