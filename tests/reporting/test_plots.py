"""Figures by the data of their lines, and Table 1, against sums worked out here."""

from typing import Any

import matplotlib.axes
import numpy as np
import pytest
from matplotlib.collections import LineCollection

from speculative.reporting import plots, tables
from speculative.rows.records import Record
from tests.printed import printed
from tests.rows import made


def row(gamma: int, alpha: float, speedup: float, **changes: object) -> Record:
    return made.record(
        gamma=gamma,
        alpha=alpha,
        alpha_low=alpha - 0.02,
        alpha_high=alpha + 0.03,
        tokens_per_call=10 * alpha,
        speedup=speedup,
        speedup_low=speedup - 0.1,
        speedup_high=speedup + 0.2,
        **changes,
    )


ROWS = [row(3, 0.5, 1.5, c=0.16), row(6, 0.8, 2.5, c=0.1), row(3, 0.6, 1.75, c=0.184)]


def drawn(axes: matplotlib.axes.Axes) -> dict[str, np.ndarray]:
    """What is drawn, [points, 2], by its label; each label is there once."""
    labels = [str(line.get_label()) for line in axes.lines]
    assert len(set(labels)) == len(labels)
    return {
        name: np.array(line.get_xydata()) for name, line in zip(labels, axes.lines, strict=True)
    }


def intervals(axes: matplotlib.axes.Axes) -> list[list[list[float]]]:
    found = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
    return [np.round(segment, 6).tolist() for segments in found for segment in segments]


def written(axes: matplotlib.axes.Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(axes: matplotlib.axes.Axes) -> list[str]:
    shown = axes.get_legend()
    return [text.get_text() for text in shown.get_texts()] if shown else []


def series(alpha: np.ndarray, gamma: int) -> np.ndarray:
    """Equation 1 as a polynomial of alpha."""
    return np.polyval(np.ones(gamma + 1), alpha)


@pytest.mark.parametrize(("rows", "more"), [([], []), (ROWS, [6])])
def test_figure_2_is_equation_1(rows: list[Record], more: list[int]) -> None:
    (axes,) = plots.figure_2(rows).axes
    lines = drawn(axes)
    for gamma in (1, 3, 5, 7, 10, *more):
        alpha, tokens = lines.pop(f"γ = {gamma}").T
        np.testing.assert_allclose(tokens, series(alpha, gamma))
        assert (alpha[0], alpha[-1]) == (0, 1)
    alpha, tokens = lines.pop("γ = ∞").T
    np.testing.assert_allclose((1 - alpha[:-1]) * tokens[:-1], 1)
    assert tokens[-1] == float("inf")
    assert len(lines) == (2 if rows else 0)
    assert written(axes)[-1] == "γ = ∞"


def test_figure_2_sets_what_was_measured_at_its_gamma() -> None:
    (axes,) = plots.figure_2([*ROWS, row(3, 0.7, 1.9, simulated_alpha=0.7)]).axes
    lines = drawn(axes)
    assert legend(axes) == ["measured, γ = 3", "simulated α, γ = 3", "measured, γ = 6"]
    np.testing.assert_allclose(lines["measured, γ = 3"], [[0.5, 5], [0.6, 6]])
    np.testing.assert_allclose(lines["simulated α, γ = 3"], [[0.7, 7]])
    np.testing.assert_allclose(lines["measured, γ = 6"], [[0.8, 8]])
    assert intervals(axes)[0] == [[0.48, 5], [0.53, 5]]


@pytest.mark.parametrize("rows", [[], ROWS])
def test_figure_4_sets_time_beside_operations(rows: list[Record]) -> None:
    left, right = plots.figure_4(rows).axes
    speedups, operations = drawn(left), drawn(right)
    for gamma in (1, 3, 5, 7, 10):
        alpha, factor = speedups[f"γ = {gamma}"].T
        np.testing.assert_allclose(factor, series(alpha, gamma))
        alpha, factor = operations[f"γ = {gamma}"].T
        np.testing.assert_allclose(factor * series(alpha, gamma), gamma + 1)
    assert left.get_ylim() == right.get_ylim()
    assert legend(left) == (["measured, γ = 3", "measured, γ = 6"] if rows else [])
    if rows:
        np.testing.assert_allclose(speedups["measured, γ = 3"], [[0.5, 1.5], [0.6, 1.75]])
        assert [[0.48, 1.5], [0.53, 1.5]] in intervals(left)
        assert [[0.8, 2.4], [0.8, 2.7]] in intervals(left)
        assert len(intervals(left)) == 6 and not intervals(right)


def test_table_1_computed_and_as_printed() -> None:
    lines = [line.split() for line in printed(tables.show_theory, width=80).splitlines()[1:7]]
    # 1 + 0.6 + 0.36 tokens a pass of 3 positions: 1.96, and 3 / 1.96 operations.
    assert lines[0] == "0.6 2 1.53 1.53 1.96 1.96".split()
    assert lines[5] == "0.9 10 1.60 1.60 6.86 6.86".split()
    for _, _, *cells in lines:
        operations, operations_printed, speedup, speedup_printed = map(float, cells)
        assert speedup == pytest.approx(speedup_printed, abs=0.011)
        assert operations == pytest.approx(operations_printed, abs=0.011)


def test_names_are_drawn_as_they_are() -> None:
    """What Matplotlib would take for mathematics, or leave out, and what its font lacks."""
    counted = made.record(gamma=3, alpha=0.8, num_target_calls=20, accepted_by_position=[16, 10, 5])
    names = ["dr$$aft", "_dr$x_{1$", "$a$", "\\frac", "翻訳", "", "0"]
    figure = plots.acceptance({name: (counted, [[1.0] * 8]) for name in names})
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*names, "αⁱ: one rate for all"]
    assert not any(text.get_parse_math() for text in legend.get_texts())
    handles: list[Any] = list(legend.legend_handles)
    for handle, line in zip(handles, figure.axes[0].lines[:-1:2], strict=False):
        assert handle.get_color() is line.get_color()


def test_acceptance_by_position_and_by_place() -> None:
    counted = made.record(gamma=3, alpha=0.8, num_target_calls=20, accepted_by_position=[16, 10, 5])
    betas = [[1.0] * 8 + [0.5] * 3] * 10 + [[0.0] * 8]
    steps, places = plots.acceptance({"a row": (counted, betas)}).axes
    lines = [np.array(line.get_xydata()).tolist() for line in steps.lines]
    assert lines[0] == [[1, 0.8], [2, 0.5], [3, 0.25]]
    np.testing.assert_allclose(lines[1], [[1, 0.8], [2, 0.64], [3, 0.512]])
    # 88 tokens of the first eight places, of which ten texts in eleven have 1; 30 of the others.
    found = np.array(places.lines[0].get_xydata())
    np.testing.assert_allclose(found, [[4.5, 10 / 11], [12.5, 0.5]])
    few = plots.acceptance({"a row": (counted, betas[:2])}).axes[1].lines[0].get_ydata()
    assert np.isnan(np.asarray(few, float)).all()
