"""A figure of the paper, drawn from theory, from records, or from what a pair decodes."""

import pathlib
from collections.abc import Sequence

from speculative import checks, disk
from speculative.measurement.timing import TURNS
from speculative.pair import Pair
from speculative.reporting import page, plots, tables, traces
from speculative.rows import memory, records, weights
from speculative.rows.config import RowConfig
from speculative.rows.workload import workload
from speculative.studies import sweep
from speculative.tasks.prompts import Prompt, load_prompts

TIMED = (3, 7)  # Gammas of Figure 5, next to autoregressive decoding.


def draw(
    number: int, config: RowConfig, text: str | None, files: Sequence[str], output: pathlib.Path
) -> None:
    """Draws a figure into a file; Figure 1 is printed too.

    In Figures 1 and 5 the row's pair decodes a text, by default the first of the row's own.
    Figures 2 to 4 lay the records of some files over the theory. A ValueError says what is missing
    or does not fit the figure.
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
    if missing := [file for file in files if not pathlib.Path(file).is_file()]:
        raise ValueError(f"There are no records at {missing[0]}.")
    disk.writable(output)
    if number == 1:
        gamma = config.gamma or sweep.GAMMA
        trace = traces.trace(*_loaded(config, text), config, gamma)
        traces.show(trace, gamma, tables.CONSOLE)
        html = page.shell(f"Figure 1: {trace.source}", traces.html(trace, gamma))
        disk.write(output, html)
        return
    if number == 5:
        figure = _figure_5(config, text)
    else:
        found = [record for file in files for record in records.read(file)]
        figure = {2: plots.figure_2, 3: plots.figure_3, 4: plots.figure_4}[number](found)
    with disk.written(output) as part:
        figure.savefig(part, bbox_inches="tight", dpi=150)


def _loaded(config: RowConfig, text: str | None) -> tuple[Pair, str]:
    """A row's pair, and a text or, without one, the first of the row's task."""
    found = weights.resolve(config)
    memory.require(config, found.configs)
    if text is None:
        text = load_prompts(config.texts, 1)[0].source
    source = checks.text("The text", text)
    return found.load(), source


def _figure_5(config: RowConfig, text: str | None) -> plots.Figure:
    pair, source = _loaded(config, text)
    work = workload(pair, config, [Prompt(source, "")])
    emitted = {gamma: [int(s.count[0]) for s in work.steps(0, gamma)] for gamma in (0, *TIMED)}
    meter = work.meter(TIMED, [sum(emitted[0])])
    for _ in range(TURNS):
        meter.turn()
    return plots.figure_5(meter.costs(), emitted)
