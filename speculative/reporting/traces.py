"""Figure 1 of the paper for a prompt: what each step of Algorithm 1 accepted and corrected."""

import dataclasses
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from speculative.decoding import tracing
from speculative.pair import Pair, Request, Result
from speculative.vocabulary import Vocabulary


class Line(NamedTuple):
    """One step as text, whose parts are empty where there is none."""

    accepted: str  # Guesses.
    rejected: str  # The first guess that was not.
    corrected: str  # The target's own token, unless the output ended before.
    kept: int  # Accepted guesses for which the output had room.


@dataclasses.dataclass(frozen=True)
class PromptTrace:
    """A prompt decoded by the reference loop, whose steps are `lines`, and by the fast path."""

    source: str
    lines: list[Line]
    result: Result
    same_tokens: bool


def trace(pair: Pair, source: str, request: Request) -> PromptTrace:
    """Decodes a source by both paths, from the same random numbers."""
    draws, config = request.draws, request.config
    result = pair.results(pair.run(request.source, draws, config))[0]
    row = np.asarray(request.source)[0], np.asarray(draws)[0]
    steps = tracing.generate(pair.target, pair.draft, pair.params, *row, config)
    lines = [line(step, pair.vocabulary) for step in steps.steps]
    return PromptTrace(source, lines, result, steps.tokens == result.tokens)


def line(step: tracing.TraceStep, vocabulary: Vocabulary) -> Line:
    """A step's tokens as text; one may end before all that was accepted is emitted."""
    accepted, corrected = step.emitted[: step.accepted], step.emitted[step.accepted :]
    rejected = step.guesses[step.accepted : step.accepted + 1] if corrected else []

    def text(tokens: list[int]) -> str:
        return "".join(vocabulary.pieces[token] for token in tokens).replace("▁", " ")

    return Line(text(accepted), text(rejected), text(corrected), len(accepted))


LEGEND = Line("accepted guess", "rejected guess", "the target's own token", 0)
# Of the texts of a `Line`: their styles, and marks where there is no colour.
LOOKS = (("green", "", ""), ("red strike", "[-", "-]"), ("bold blue", "{+", "+}"))


def _shown(line: Line, coloured: bool) -> list[Text]:
    return [
        Text(part, style) if coloured or not part else Text(f"{before}{part}{after}")
        for part, (style, before, after) in zip(line[:3], LOOKS, strict=True)
    ]


def show(trace: PromptTrace, gamma: int, console: Console) -> None:
    """Prints the prompt, the legend and a line a step."""
    coloured = console.color_system is not None and not console.no_color
    console.print(trace.source, style="dim", highlight=False, markup=False)
    console.print(Text(", ").join(_shown(LEGEND, coloured)))
    console.print(render(trace.lines, gamma, coloured))


def render(lines: list[Line], gamma: int, coloured: bool) -> Text:
    """A line a step: its number, how many of its guesses were accepted, and its tokens."""
    shown = [
        Text.assemble(f"{number:3}  {step.kept}/{gamma} │", *_shown(step, coloured))
        for number, step in enumerate(lines, 1)
    ]
    return Text("\n").join(shown)
