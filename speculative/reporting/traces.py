"""Figure 1 of the paper for a prompt: what each step of Algorithm 1 accepted and corrected."""

import dataclasses

import numpy as np
from rich.console import Console
from rich.text import Text

from speculative.decoding import reference
from speculative.decoding.reference import TraceStep
from speculative.pair import Pair, Request, Result
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


def trace(pair: Pair, source: str, request: Request) -> PromptTrace:
    """Decodes a source by both paths, from the same random numbers."""
    draws, config = request.draws, request.config
    result = pair.results(pair.run(request.source, draws, config))[0]
    row = np.asarray(request.source)[0], np.asarray(draws)[0]
    steps = reference.generate(pair.target, pair.draft, pair.params, *row, config)
    lines = [line(step, pair.vocabulary) for step in steps.steps]
    return PromptTrace(source, lines, result, steps.tokens == result.tokens)


def line(step: TraceStep, vocabulary: Vocabulary) -> Line:
    """A step's tokens as text; one may end before all that was accepted is emitted."""
    accepted, corrected = step.emitted[: step.accepted], step.emitted[step.accepted :]
    rejected = step.guesses[step.accepted : step.accepted + 1] if corrected else []

    def text(tokens: list[int]) -> str:
        return "".join(vocabulary.pieces[token] for token in tokens).replace("▁", " ")

    return Line(text(accepted), text(rejected), text(corrected), len(accepted))


# The parts of a `Line`, in order: what each means, its style, and marks where there is no colour.
LOOKS = {
    "accepted": ("accepted guess", "green", "", ""),
    "rejected": ("rejected guess", "red strike", "[-", "-]"),
    "corrected": ("the target's own token", "bold blue", "{+", "+}"),
}


def _shown(part: str, text: str, coloured: bool) -> Text:
    _, style, before, after = LOOKS[part]
    return Text(text, style) if coloured or not text else Text(f"{before}{text}{after}")


def show(trace: PromptTrace, gamma: int, console: Console) -> None:
    """Prints the prompt, the legend and a line a step."""
    coloured = console.color_system is not None and not console.no_color
    console.print(trace.source, style="dim", highlight=False, markup=False)
    legend = (_shown(part, meaning, coloured) for part, (meaning, *_) in LOOKS.items())
    console.print(Text(", ").join(legend))
    console.print(render(trace.lines, gamma, coloured))


def render(lines: list[Line], gamma: int, coloured: bool) -> Text:
    """A line a step: its number, how many of its guesses were accepted, and its tokens."""
    shown = []
    for number, step in enumerate(lines, 1):
        parts = (_shown(part, getattr(step, part), coloured) for part in LOOKS)
        shown.append(Text.assemble(f"{number:3}  {step.count}/{gamma} │", *parts))
    return Text("\n").join(shown)
