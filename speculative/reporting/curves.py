"""The curves of a training run, from the lines of its log (`training.loop.fit`)."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speculative.measurement.quality import METRICS

Line = Mapping[str, float]


def curve(axes: Axes, lines: Sequence[Line], key: str, label: str, marker: str = "") -> None:
    """Plots a number over steps, from the lines that have it."""
    points = [(line["step"], line[key]) for line in lines if key in line]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1)


def held_out(lines: Sequence[Line], *metrics: str) -> list[str]:
    """The columns of held-out files that end in one of these metrics."""
    columns = {key for line in lines for key in line if "/" in key}
    return sorted(key for key in columns if key.rpartition("/")[2] in metrics)


def training(lines: Sequence[Line]) -> Figure:
    """Plots loss, accuracy or scores, gradient, learning rate and speed; marks the best step."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    loss, score, gradient, speed = figure.subplots(2, 2).flat
    curve(loss, lines, "loss", "training")
    for key in held_out(lines, "loss"):
        curve(loss, lines, key, key.removesuffix("/loss"), "o")
    loss.set(ylabel="loss (nats per token)")
    scored = held_out(lines, *METRICS)
    for key in scored:
        curve(score, lines, key, key.replace("/", ", "), "o")
    if not scored:
        curve(score, lines, "accuracy", "training")
        for key in held_out(lines, "accuracy"):
            curve(score, lines, key, key.removesuffix("/accuracy"), "o")
    score.set(ylabel="score (%)" if scored else "accuracy of the likeliest token")
    curve(gradient, lines, "gradient_norm", "gradient's norm")
    curve(gradient, lines, "learning_rate", "learning rate")
    gradient.set(yscale="log")
    curve(speed, lines, "tokens_per_second", "tokens per second")
    speed.set(ylim=(0, None))
    scored_lines = [line for line in reversed(lines) if "score" in line]  # Ties go to the last.
    best = max(scored_lines, key=lambda line: line["score"], default=None)
    for axes in (loss, score, gradient, speed):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if best and axes in (loss, score):
            label = f"best, step {best['step']:,}"
            axes.axvline(best["step"], color="dimgrey", linestyle="--", linewidth=1, label=label)
        if axes.lines:
            axes.legend(fontsize=8)
    return figure
