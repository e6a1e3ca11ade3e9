"""Traces: what each step accepted and corrected, as hand-made steps and a tiny pair say it."""

import io
import pathlib
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from rich.console import Console

import speculative
from speculative.decoding import Output, reference
from speculative.decoding.reference import Trace, TraceStep
from speculative.pair import Pair, Result
from speculative.reporting import traces
from speculative.reporting.traces import Line, PromptTrace
from speculative.rows.config import RowConfig
from speculative.vocabulary import Vocabulary
from tests.saved import VOCABULARY

EOS = 1
ROW = RowConfig(task="debian_ende", target="a", draft="b", temperature=1.0, max_length=12, seed=5)


def step(guesses: list[int], accepted: int, next_token: int, emitted: list[int]) -> TraceStep:
    nothing = np.zeros((0, 0))
    return TraceStep(guesses, nothing, nothing, accepted, next_token, emitted)


PIECES = Vocabulary(VOCABULARY)
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


def page(lines: list[Line], source: str = "a text") -> ElementTree.Element:
    """The fragment, read by a parser that accepts no stray or open element."""
    trace = PromptTrace(source, lines, Result("", [], 1, 0, [], []), same_tokens=True)
    return ElementTree.fromstring(traces.html(trace, 3))


def test_html_has_an_item_a_step() -> None:
    first, second = page(LINES).findall("./ol/li")
    assert ["".join(item.itertext()) for item in (first, second)] == ["2/3 │ a[b c d", "3/3 │e f"]
    parts = [(part.tag, part.text, part.get("style")) for part in first]
    assert [part[:2] for part in parts] == [
        ("small", "2/3"),
        ("span", " a[b"),
        ("del", " c"),
        ("ins", " d"),
    ]
    assert [part.tag for part in second] == ["small", "span", "ins"]
    assert first.get("style") == "white-space: pre-wrap"


def test_html_has_colours_of_its_own_and_a_legend_of_them() -> None:
    found = page(LINES)
    legend = found.findall("./figcaption/small/*")
    assert [(part.tag, part.text) for part in legend] == [
        ("span", "accepted guess"),
        ("del", "rejected guess"),
        ("ins", "the target's own token"),
    ]
    styles = [part.get("style") or "" for part in legend]
    assert styles == [part.get("style") for part in found[1][0][1:]]
    for strongest, style in zip("GRB", styles, strict=True):
        digits = style.partition("#")[2][:6]
        light = dict(zip("RGB", bytes.fromhex(digits), strict=True))
        assert max(light, key=lambda channel: light[channel]) == strongest
    assert "background: #fff" in (found.get("style") or "")


def test_html_shows_text_and_obeys_none() -> None:
    hostile = """<script>&amp;"'</li>"""
    found = page([Line(hostile, hostile, hostile, 1)], hostile)
    assert found.findtext("./figcaption") == hostile
    assert [part.text for part in found[1][0][1:]] == [hostile] * 3
    assert not found.findall(".//script")


def test_a_trace_spells_the_fast_paths_output(pair: Pair) -> None:
    found = traces.trace(pair, "A small editor.", ROW, 2)
    assert found.same_tokens
    expected = pair.generate("A small editor.", seed=5, gamma=2, temperature=1.0, max_length=12)
    spelled = "".join(pair.vocabulary.pieces[token] for token in expected.tokens)
    assert "".join(x.accepted + x.corrected for x in found.lines) == spelled.replace("▁", " ")
    assert sum(x.count for x in found.lines) == expected.accepted > 0
    assert len(found.lines) == expected.target_calls


def test_a_trace_among_texts_is_as_wide_as_they_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it runs the program that decoded them, and emits what it would alone."""
    run, shapes = Pair.run, list[tuple[int, ...]]()

    def noted(self: Pair, sources: jax.Array, *rest: Any) -> Output:
        shapes.append(sources.shape)
        return run(self, sources, *rest)

    monkeypatch.setattr(Pair, "run", noted)
    text, longer = "A small editor.", "A small editor. " * 20
    among = traces.trace(pair, text, ROW, 2, [longer])
    assert among.same_tokens
    assert among == traces.trace(pair, text, ROW, 2)
    assert shapes == [pair.encode(longer).shape, pair.encode(text).shape]
    assert shapes[0] > shapes[1]


def test_a_trace_that_differs_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.generate

    def cut_short(*arguments) -> Trace:
        return Trace(whole(*arguments).steps[:-1])

    monkeypatch.setattr(reference, "generate", cut_short)
    assert not traces.trace(pair, "A small editor.", ROW, 2).same_tokens
