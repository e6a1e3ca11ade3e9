"""Traces: what each step accepted and corrected, as hand-made steps and a tiny pair say it."""

import io
import pathlib
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import speculative
from speculative.decoding import tracing
from speculative.decoding.tracing import Trace, TraceStep
from speculative.pair import Pair
from speculative.reporting import traces
from speculative.reporting.traces import Line
from speculative.settings import Settings
from speculative.vocabulary import SentencePiece
from tests.saved import VOCABULARY

EOS = 1
TEXT = "A small editor."
GIVEN: dict[str, Any] = {"temperature": 1.0, "gamma": 2, "max_length": 12, "seed": 5}


def step(guesses: list[int], accepted: int, next_token: int, emitted: list[int]) -> TraceStep:
    nothing = np.zeros((0, 0))
    return TraceStep(guesses, nothing, nothing, accepted, next_token, emitted)


PIECES = SentencePiece(VOCABULARY)
THE, AND, FOR, WITH = (PIECES.pieces.index(f"▁{word}") for word in ("the", "and", "for", "with"))


@pytest.fixture(scope="module")
def pair(saved_pair: tuple[pathlib.Path, pathlib.Path]) -> Pair:
    return speculative.load(*saved_pair)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (step([THE, AND, FOR], 1, WITH, [THE, WITH]), Line(" the", " and", " with", 1)),
        (step([THE, AND], 2, FOR, [THE, AND, FOR]), Line(" the and", "", " for", 2)),
        (step([THE, EOS, AND], 3, THE, [THE, EOS]), Line(" the</s>", "", "", 2)),
        # Room for the accepted guess, none for the correction: the rejection has no consequence.
        (step([THE, AND], 1, FOR, [THE]), Line(" the", "", "", 1)),
    ],
    ids=["rejected", "all accepted", "end inside", "cut"],
)
def test_the_line_of_a_step(made: TraceStep, line: Line) -> None:
    assert traces.line(made, PIECES) == line


LINES = [Line(" a[b", " c", " d", 2), Line("e", "", " f", 3)]


def test_marks_where_there_is_no_colour() -> None:
    assert str(traces.render(LINES, 3, coloured=False)) == (
        "  1  2/3 │ a[b[- c-]{+ d+}\n  2  3/3 │e{+ f+}"
    )


def test_colours_are_the_papers() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", no_color=False)
    console.print(traces.render(LINES[:1], 3, coloured=True))
    # 32 is green, 31 red, 9 struck through, 1;34 bold blue.
    assert out.getvalue() == (
        "  1  2/3 │\x1b[32m a[b\x1b[0m\x1b[9;31m c\x1b[0m\x1b[1;34m d\x1b[0m\n"
    )


def test_a_trace_spells_the_fast_paths_output(pair: Pair) -> None:
    found = traces.trace(pair, TEXT, pair.requests([TEXT], Settings(**GIVEN))[0])
    assert found.same_tokens
    expected = pair.generate(TEXT, **GIVEN)
    spelled = "".join(pair.vocabulary.pieces[token] for token in expected.tokens)
    assert "".join(x.accepted + x.corrected for x in found.lines) == spelled.replace("▁", " ")
    assert sum(x.kept for x in found.lines) == expected.accepted > 0
    assert len(found.lines) == expected.target_calls


def test_a_trace_that_differs_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tracing.generate

    def cut_short(*arguments) -> Trace:
        return Trace(whole(*arguments).steps[:-1])

    monkeypatch.setattr(tracing, "generate", cut_short)
    assert not traces.trace(pair, TEXT, pair.requests([TEXT], Settings(**GIVEN))[0]).same_tokens
