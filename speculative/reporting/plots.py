"""The paper's Figures 2 and 4: curves of the theory with measurements on top.

Theory is in colour, darker for the smaller parameter, and named at its lines; measurements are
black, with their 95% intervals. Figures avoid pyplot, so that none is shown or kept and no display
is needed: `figure_2([]).savefig("figure_2.png")`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

from speculative import theory
from speculative.rows.records import Record

# Parameters of the lines, in addition to those measured.
GAMMAS = (1, 3, 5, 7, 10)
ALPHAS = np.linspace(0, 1, 401)
MARKERS = "osD^v<>p*h"
PLACES, FEWEST_TOKENS = 8, 20  # For `acceptance`.
LINE = 0.21  # Height of a line of its legend, in inches.
COLUMNS = 2
LEGEND: dict[str, Any] = {"loc": "outside upper left", "ncols": COLUMNS, "frameon": False}


def figure_2(records: Sequence[Record]) -> Figure:
    """Tokens per target pass over alpha (Eq. 1), for several gamma, the oracle's, and records."""
    figure, (axes,) = _panels(1)
    _lines(axes, records, "tokens per target pass", theory.expected_tokens, 1)
    oracle = [theory.oracle_tokens(alpha) for alpha in ALPHAS]
    axes.plot(ALPHAS, oracle, color="dimgrey", linestyle="--", label="γ = ∞")
    top = axes.get_ylim()[1]
    _write(axes, "γ = ∞", (1 - 1 / top, top), (0, 7), "center")
    _points(axes, records, "tokens_per_call")
    return figure


def figure_4(records: Sequence[Record]) -> Figure:
    """The speed-up (Theorem 3.8) and the growth of operations (Theorem 3.11) over alpha.

    Both are factors over autoregressive decoding with a free draft and v = 1, as in Table 1. The
    `speedup` of a measured row has its own c and v: it should lie below the line of its gamma.
    """
    figure, (upper, lower) = _panels(2)
    speedup = functools.partial(theory.speedup, c=0.0)
    operations = functools.partial(theory.operations, c_hat=0.0)
    _lines(upper, records, "speed-up (factor, c = 0)", speedup, 1)
    _lines(lower, records, "arithmetic operations (factor, ĉ = 0)", operations, 0)
    lower.yaxis.tick_right()
    lower.yaxis.set_label_position("right")
    lower.spines[["left", "right"]].set_visible([False, True])
    for axes in (upper, lower):
        axes.axhline(1, color="black", linewidth=0.8, zorder=1)
    _points(upper, records, "speedup")
    return figure


def acceptance(rows: Mapping[str, tuple[Record, Sequence[Sequence[float]]]]) -> Figure:
    """Acceptance by position in a step and by place in the text, of named rows.

    The upper panel shows the share of steps that accepted at least i guesses, i = 1 to gamma, and
    for chains, dashed, alpha^i, which it would be if all guesses had the same rate. The lower one
    shows the mean beta over the examples (each has its betas [length]); a point stands for `PLACES`
    tokens of the text, and needs at least `FEWEST_TOKENS` tokens of examples.
    """
    figure, (steps, places) = _panels(2)
    for (name, (record, betas)), color in zip(rows.items(), _colors(len(rows)), strict=True):
        positions = np.arange(1, record.gamma + 1)
        shares = np.array(record.accepted_by_position) / record.num_target_calls
        steps.plot(positions, shares, "o-", color=color, markersize=4, label=name)
        powers = np.full(record.gamma, np.nan) if record.tree else record.alpha**positions
        steps.plot(positions, powers, "--", color=color, linewidth=1)
        bins = [np.arange(len(beta)) // PLACES for beta in betas]
        place = np.concatenate([np.zeros(0, int), *bins])
        counts = np.bincount(place)
        means = np.bincount(place, np.concatenate([[], *betas])) / counts
        kept = np.where(counts >= FEWEST_TOKENS, means, np.nan)
        middles = PLACES * np.arange(len(kept)) + (PLACES + 1) / 2
        places.plot(middles, kept, "o-", color=color, markersize=4)
    longest = max(record.gamma for record, _ in rows.values())
    steps.set(xlabel="guesses i", ylabel="share of steps that accept at least i", ylim=(0, 1))
    steps.set(xticks=range(1, longest + 1), xlim=(0.5, longest + 0.5))
    places.set(xlabel="token of the text", ylabel="acceptance β, mean", ylim=(0, 1))
    longest = max((len(beta) for _, betas in rows.values() for beta in betas), default=1)
    places.set_xlim(0, longest + 1)
    rates = steps.plot([], [], "--", color="dimgrey", linewidth=1)
    shown, names = [*steps.lines[:-1:2], *rates], [*rows, "αⁱ: one rate for all"]
    # Matplotlib would typeset text between $ as mathematics, and omit names that begin with _.
    legend = figure.legend(shown, ["name"] * len(names), **LEGEND)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=name, parse_math=False)
    figure.set_figheight(figure.get_figheight() + LINE * (len(names) // COLUMNS))
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels below each other; their x axis is alpha unless it is set again."""
    figure = Figure(figsize=(5.5, 4 * count), layout="constrained")
    panels = list(figure.subplots(count, 1, squeeze=False).flat)
    for axes in panels:
        axes.set(xlabel="acceptance rate α", xlim=(0, 1))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _colors(number: int) -> list[ColorType]:
    """From dark to light, so that grey print keeps their order; the palest would not show."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.8, number)))


def _lines(axes: Axes, records: Sequence[Record], label: str, factor: Callable, at: int) -> None:
    """Plots a factor over alpha, with a line for each of `GAMMAS` and of the records' gammas.

    Lines are named where alpha is `at`, 0 or 1.
    """
    gammas = sorted({*GAMMAS, *(record.gamma for record in records)})
    offset, side = (5, "left") if at else (-5, "right")
    for gamma, color in zip(gammas, _colors(len(gammas)), strict=True):
        values = [factor(alpha, gamma) for alpha in ALPHAS]
        axes.plot(ALPHAS, values, color=color, label=f"γ = {gamma}")
        _write(axes, f"γ = {gamma}", (at, values[-at]), (offset, 0), side)
    axes.set(ylabel=label, ylim=(0, gammas[-1] + 2))


def _points(axes: Axes, records: Sequence[Record], name: str) -> None:
    """A field of records over their alpha, with both intervals; a marker for each gamma."""
    kinds = sorted({(record.gamma, record.simulated) for record in records})
    thin = {"color": "black", "linewidth": 0.8, "zorder": 3}
    for kind, marker in zip(kinds, itertools.cycle(MARKERS), strict=False):
        rows = [record for record in records if (record.gamma, record.simulated) == kind]
        x, y = [row.alpha for row in rows], [getattr(row, name) for row in rows]
        axes.hlines(y, [row.alpha_low for row in rows], [row.alpha_high for row in rows], **thin)
        for row in rows:
            if (low := getattr(row, f"{name}_low")) is not None:
                axes.vlines(row.alpha, low, getattr(row, f"{name}_high"), **thin)
        label = f"{'simulated α' if kind[1] else 'measured'}, γ = {kind[0]}"
        axes.plot(x, y, marker, color="black", markerfacecolor="white", label=label)
    if kinds:
        axes.legend(handles=axes.lines[-len(kinds) :], loc="upper left")


def _write(axes: Axes, text: str, at: Any, offset: Any, side: str) -> None:
    """Text at a point of the axes, moved by some typographic points; it may lie outside them."""
    look = {"ha": side, "va": "center", "size": 9, "annotation_clip": False}
    axes.annotate(text, at, offset, textcoords="offset points", **look)
