"""A figure of the paper, drawn from theory, from records, or from a pair at work."""

import pathlib
from collections.abc import Sequence

from rich.console import Console

from speculative.experiments import figures, page, plan, records, sweep, traces, weights
from speculative.experiments.settings import RowConfig
from speculative.experiments.tuning import TURNS
from speculative.experiments.workload import workload
from speculative.tasks.prompts import Prompt, load_prompts

TIMED = (3, 7)
"""Gammas of Figure 5, beside standard decoding."""


def draw(
    number: int,
    config: RowConfig,
    text: str | None,
    files: Sequence[str],
    output: pathlib.Path,
    console: Console,
) -> None:
    """Draws a figure into a file; Figure 1 is shown on the console too.

    Args:
        number: 1 to 5.
        config: whose pair is at work in Figures 1 and 5.
        text: what it decodes; None is the first of the row's own.
        files: of the records that Figures 2 to 4 lay over the theory.
        output: .html for Figure 1, else .png, .svg or .pdf.
        console: where Figure 1 is shown.

    Raises:
        ValueError: a file of records is missing, the output is of another kind, Figure 5 is asked
            for at a temperature above 0, or as `weights.Loader`.
    """
    kinds = (".html",) if number == 1 else (".png", ".svg", ".pdf")
    if output.suffix not in kinds:
        raise ValueError(
            f"Figure {number} is written as {' or '.join(kinds)}, not as {output.name}."
        )
    if number == 5 and config.temperature > 0:
        raise ValueError(
            "Figure 5 compares ways of decoding one text; set RowConfig.temperature = 0.0."
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    if number == 1:
        _figure_1(config, text, output, console)
        return
    if number == 5:
        figure = _figure_5(config, text)
    else:
        found = [record for file in files for record in _records(file)]
        figure = {2: figures.figure_2, 3: figures.figure_3, 4: figures.figure_4}[number](found)
    figure.savefig(output, bbox_inches="tight", dpi=150)


def _records(file: str) -> list[records.Record]:
    if not pathlib.Path(file).is_file():
        raise ValueError(f"There are no records at {file}.")
    return records.read(file)


def _prompt(config: RowConfig, text: str | None) -> Prompt:
    return Prompt(text, "") if text else load_prompts(config.task, 1, config.data_file)[0]


def _figure_1(config: RowConfig, text: str | None, output: pathlib.Path, console: Console) -> None:
    plan.require(config)
    pair, gamma = weights.Loader()(config), config.gamma or sweep.GAMMA
    source = _prompt(config, text).source
    trace = traces.trace(
        pair, source, gamma, config.sampling, config.max_length, config.seed, config.lenience
    )
    coloured = console.color_system is not None and not console.no_color
    console.print(trace.source, style="dim", highlight=False, markup=False)
    console.print(traces.legend(coloured))
    console.print(traces.render(trace.lines, gamma, coloured))
    shown = page.shell(f"Figure 1: {trace.source}", traces.html(trace, gamma))
    output.write_text(shown, encoding="utf-8")


def _figure_5(config: RowConfig, text: str | None) -> figures.Figure:
    plan.require(config)
    prompts = [_prompt(config, text)]
    work = workload(weights.Loader()(config), config, prompts)
    emitted = {gamma: [int(s.count[0]) for s in work.steps(0, gamma)] for gamma in (0, *TIMED)}
    meter = work.meter(TIMED, [sum(emitted[0])])
    for _ in range(TURNS):
        meter.turn()
    return figures.figure_5(meter.costs(), emitted)
