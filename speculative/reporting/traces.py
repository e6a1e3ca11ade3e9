"""Figure 1 of the paper for a prompt: tokens that steps of Algorithm 1 accepted and corrected."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from speculative import disk
from speculative.decoding import tracing
from speculative.pair import Pair, Request, Result
from speculative.vocabulary import Vocabulary


class Line(NamedTuple):
    """One step as text; missing parts are empty."""

    accepted: str  # Guesses.
    rejected: str  # The first guess that was not accepted.
    corrected: str  # The target's own token, unless the output ended before.
    kept: int  # Accepted guesses for which the output had room.


@dataclasses.dataclass(frozen=True)
class PromptTrace:
    """A prompt decoded by the traced loop, whose steps are `lines`, and by the fast path."""

    source: str
    lines: list[Line]
    result: Result
    same_tokens: bool
    pieces: list[str]  # The text of each token of the output.


class Replay(NamedTuple):
    """A trace as it is kept in a file: the text of each token, and of each target call."""

    source: str
    pieces: list[str]
    steps: list[tuple[str, str]]  # Accepted guesses, and the target's own token.


def keep(folder: pathlib.Path, traced: Mapping[str, PromptTrace]) -> None:
    """Writes the traces of rows, by the rows' names, into a results folder."""
    lines = []
    for name, one in traced.items():
        steps = [(step.accepted, step.corrected) for step in one.lines]
        fields = {"experiment": name, "source": one.source, "pieces": one.pieces, "steps": steps}
        lines.append(f"{disk.json_line(fields)}\n")
    disk.write(folder / FILE, "".join(lines))


def read(folder: pathlib.Path) -> list[tuple[str, Replay]]:
    """The kept traces of a results folder, with the names of their rows."""

    def entry(line: Any) -> tuple[str, Replay]:
        steps = [(accepted, own) for accepted, own in line["steps"]]
        return line["experiment"], Replay(line["source"], line["pieces"], steps)

    return disk.entries(folder / FILE, entry, "trace")


FILE = "traces.jsonl"


def trace(pair: Pair, source: str, request: Request) -> PromptTrace:
    """Decodes a source by both paths, with the same random numbers."""
    draws, config = request.draws, request.config
    result = pair.results(pair.run(request.source, draws, config))[0]
    row = np.asarray(request.source)[0], np.asarray(draws)[0]
    steps = tracing.generate(pair.target, pair.draft, pair.params, *row, config)
    lines = [line(step, pair.vocabulary) for step in steps.steps]
    pieces = [text([token], pair.vocabulary) for token in result.tokens]
    return PromptTrace(source, lines, result, steps.tokens == result.tokens, pieces)


def text(tokens: list[int], vocabulary: Vocabulary) -> str:
    """Tokens as text, special ones included."""
    return "".join(vocabulary.pieces[token] for token in tokens).replace("▁", " ")


def line(step: tracing.TraceStep, vocabulary: Vocabulary) -> Line:
    """A step's tokens as text; the output may end before all accepted ones are emitted."""
    accepted, corrected = step.emitted[: step.accepted], step.emitted[step.accepted :]
    rejected = step.guesses[step.accepted : step.accepted + 1] if corrected else []
    texts = [text(tokens, vocabulary) for tokens in (accepted, rejected, corrected)]
    return Line(texts[0], texts[1], texts[2], len(accepted))


LEGEND = Line("accepted guess", "rejected guess", "the target's own token", 0)
# Styles of the texts of a `Line`, and marks for them where there is no colour.
LOOKS = (("green", "", ""), ("red strike", "[-", "-]"), ("bold blue", "{+", "+}"))


def _shown(line: Line, coloured: bool) -> list[Text]:
    return [
        Text(part, style) if coloured or not part else Text(f"{before}{part}{after}")
        for part, (style, before, after) in zip(line[:3], LOOKS, strict=True)
    ]


def legend(coloured: bool) -> Text:
    """The meanings of the styles, or of the marks where there is no colour."""
    return Text(", ").join(_shown(LEGEND, coloured))


def show(trace: PromptTrace, gamma: int, console: Console) -> None:
    """Prints the prompt, the legend and a line per step."""
    coloured = console.color_system is not None and not console.no_color
    console.print(trace.source, style="dim", highlight=False, markup=False)
    console.print(legend(coloured))
    console.print(render(trace.lines, gamma, coloured))


def render(lines: list[Line], gamma: int, coloured: bool) -> Text:
    """One line per step: its number, how many of its guesses were accepted, and its tokens."""
    shown = [
        Text.assemble(f"{number:3}  {step.kept}/{gamma} │", *_shown(step, coloured))
        for number, step in enumerate(lines, 1)
    ]
    return Text("\n").join(shown)
