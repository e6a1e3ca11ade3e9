"""Figure 1 of the paper for a prompt: what each step of Algorithm 1 accepted and corrected."""

import dataclasses
from html import escape

import numpy as np
from rich.text import Text

from speculative.decoding import random_draws, reference
from speculative.decoding.reference import TraceStep
from speculative.pair import Pair, Result
from speculative.sampling import Sampling
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
    pair: Pair,
    source: str,
    gamma: int,
    sampling: Sampling,
    max_length: int,
    seed: int,
    lenience: float = 1.0,
) -> PromptTrace:
    """Decodes a task's first source by both paths.

    Raises:
        ValueError: the source is empty, or a setting is out of range.
    """
    settings = (sampling.temperature, sampling.top_k, sampling.top_p, max_length, lenience)
    config = pair.decoding(gamma, *settings)
    inputs = pair.encode(source, truncate=True)
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


MEANINGS = {
    "accepted": "accepted guess",
    "rejected": "rejected guess",
    "corrected": "the target's own token",
}

HTML = {
    "accepted": ("span", "color: #1a7f37"),
    "rejected": ("del", "color: #b3261e"),
    "corrected": ("ins", "color: #0b57d0; font-weight: bold"),
}
"""A part's element and style: a browser strikes `del` and underlines `ins`, colour or none."""


def legend(coloured: bool) -> Text:
    """What colours or marks stand for."""
    return Text(", ").join(_part(part, MEANINGS[part], coloured) for part in LEGEND)


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


def html(trace: PromptTrace, gamma: int) -> str:
    """A fragment for any page, with its own styles: the prompt, the legend and a line a step."""
    # Its own background too: on a dark page these colours would not show.
    page = "background: #fff; color: #222; padding: 1em; margin: 1em 0; font-family: monospace"
    words = ", ".join(_element(part, MEANINGS[part]) for part in HTML)
    shown = [
        f'<figure style="{page}">',
        f"<figcaption>{escape(trace.source)}<br/><small>{words}</small></figcaption>",
        "<ol>",
    ]
    for step in trace.lines:
        text = "".join(_element(part, getattr(step, part)) for part in HTML)
        # A token may begin with several spaces, of which a browser would show one.
        style = "white-space: pre-wrap"
        shown.append(f'<li style="{style}"><small>{step.count}/{gamma}</small> │{text}</li>')
    return "\n".join([*shown, "</ol>", "</figure>"]) + "\n"


def _element(part: str, text: str) -> str:
    name, style = HTML[part]
    return f'<{name} style="{style}">{escape(text)}</{name}>' if text else ""
