"""Figure 1 of the paper for a prompt: what each step of Algorithm 1 accepted and corrected."""

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from speculative.decoding import reference
from speculative.decoding.reference import TraceStep
from speculative.pair import Pair, Result
from speculative.rows.config import RowConfig
from speculative.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Line:
    """One step as text: its accepted guesses, the first rejected one, the target's own token.

    The last two are empty where there is none: all guesses were accepted, or the output ended
    before. `count` is the number of accepted guesses for which the output had room.
    """

    accepted: str
    rejected: str
    corrected: str
    count: int


@dataclasses.dataclass(frozen=True)
class PromptTrace:
    """A prompt decoded by the reference loop, whose steps are `lines`, and by the fast path."""

    source: str
    lines: list[Line]
    result: Result
    same_tokens: bool


def trace(
    pair: Pair, source: str, config: RowConfig, gamma: int, among: Sequence[str] = ()
) -> PromptTrace:
    """Decodes a source with a row's settings by both paths, from the same random numbers.

    It is padded as it is `among` other texts: if they were decoded, no program is compiled for it.
    """
    decoding = pair.decoding(
        gamma,
        *(config.temperature, config.top_k, config.top_p, config.min_p),
        *(config.max_length, config.lenience, config.verification),
    )
    inputs = pair.encode([source, *among], truncate=True)[:1]
    draws = decoding.draws(config.seed, np.array([0]))
    result = pair.results(pair.run(inputs, draws, decoding))[0]
    row = np.asarray(inputs)[0], np.asarray(draws)[0]
    steps = reference.generate(pair.target, pair.draft, pair.params, *row, decoding)
    lines = [line(step, pair.vocabulary) for step in steps.steps]
    return PromptTrace(source, lines, result, steps.tokens == result.tokens)


def line(step: TraceStep, vocabulary: Vocabulary) -> Line:
    """A step's tokens as text; one may end before all that was accepted is emitted."""
    accepted, corrected = step.emitted[: step.accepted], step.emitted[step.accepted :]
    rejected = step.guesses[step.accepted : step.accepted + 1] if corrected else []

    def text(tokens: list[int]) -> str:
        return "".join(vocabulary.pieces[token] for token in tokens).replace("▁", " ")

    return Line(text(accepted), text(rejected), text(corrected), len(accepted))


class Look(NamedTuple):
    """How a part of a line shows, on a terminal and on a page."""

    meaning: str
    style: str  # With colour.
    marks: tuple[str, str]  # Before and after it, without colour.
    element: str  # A browser strikes `del` and underlines `ins`, with colour or without.
    css: str

    def text(self, text: str, coloured: bool) -> Text:
        """A part for the terminal."""
        if coloured or not text:
            return Text(text, self.style)
        return Text(text.join(self.marks))

    def html(self, text: str) -> str:
        """A part as an element; nothing where it is empty."""
        return f'<{self.element} style="{self.css}">{escape(text)}</{self.element}>' * bool(text)


CORRECTED = "color: #0b57d0; font-weight: bold"
LOOKS = {
    "accepted": Look("accepted guess", "green", ("", ""), "span", "color: #1a7f37"),
    "rejected": Look("rejected guess", "red strike", ("[-", "-]"), "del", "color: #b3261e"),
    "corrected": Look("the target's own token", "bold blue", ("{+", "+}"), "ins", CORRECTED),
}
"""The parts of a `Line`, in order."""


def show(trace: PromptTrace, gamma: int, console: Console) -> None:
    """Prints the prompt, the legend and a line a step."""
    coloured = console.color_system is not None and not console.no_color
    console.print(trace.source, style="dim", highlight=False, markup=False)
    console.print(Text(", ").join(look.text(look.meaning, coloured) for look in LOOKS.values()))
    console.print(render(trace.lines, gamma, coloured))


def render(lines: list[Line], gamma: int, coloured: bool) -> Text:
    """A line a step: its number, how many of its guesses were accepted, and its tokens."""
    shown = []
    for number, step in enumerate(lines, 1):
        parts = (look.text(getattr(step, part), coloured) for part, look in LOOKS.items())
        shown.append(Text.assemble(f"{number:3}  {step.count}/{gamma} │", *parts))
    return Text("\n").join(shown)


def html(trace: PromptTrace, gamma: int) -> str:
    """A fragment for any page, with its own styles: the prompt, the legend and a line a step."""
    # Its own background too: on a dark page these colours would not show.
    page = "background: #fff; color: #222; padding: 1em; margin: 1em 0; font-family: monospace"
    legend = ", ".join(look.html(look.meaning) for look in LOOKS.values())
    steps = ""
    for step in trace.lines:
        text = "".join(look.html(getattr(step, part)) for part, look in LOOKS.items())
        # A token may begin with several spaces, of which a browser would show one.
        style = "white-space: pre-wrap"
        steps += f'<li style="{style}"><small>{step.count}/{gamma}</small> │{text}</li>\n'
    return f"""<figure style="{page}">
<figcaption>{escape(trace.source)}<br/><small>{legend}</small></figcaption>
<ol>
{steps}</ol>
</figure>
"""
