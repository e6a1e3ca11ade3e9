"""The paper's tables and figures, rerun from configurations."""

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from speculative.commands import DTYPES, MAX_SEED, Command, whole

if TYPE_CHECKING:
    from speculative.experiments.records import Record
    from speculative.experiments.settings import RowConfig

DEMO = "demo"
"""In place of a folder of checkpoints: the pair that ships."""

PAPER = "paper"
"""In place of a chance of acceptance: that of the paper's own row."""

ROWS = pathlib.Path(__file__).parents[2] / "configs" / "runs"
SHIPPED_ROW = str(ROWS / "table2" / "debian_ende_t0.gin")


def _add_models(parser: argparse.ArgumentParser) -> None:
    """What a command may change of a row's models."""
    add = parser.add_argument
    parser.set_defaults(data_file=[], limit=None, seed=None)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--checkpoints", metavar="DIR", help="folder of checkpoints, or demo")
    models.add_argument("--weights", choices=["random"], help="true sizes, no checkpoints")
    add(
        "--simulated_alpha",
        type=_chance,
        metavar="A",
        help="accept guesses with this chance, or with each row's in the paper: times alone are "
        "real",
    )
    add("--vocabulary", metavar="FILE", help="SentencePiece model, where a checkpoint has none")
    add("--dtype", choices=DTYPES, help="of weights and products (as configured)")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """What a command may change of a row's texts."""
    add = parser.add_argument
    add(
        "--data_file",
        action="append",
        metavar="[TASK=]FILE",
        help="texts of a task: .tsv, .jsonl, or two parallel files with a comma between",
    )
    add("--limit", type=whole(1, 10**6), metavar="N", help="examples a row (as configured)")
    add("--seed", type=whole(0, MAX_SEED), help="of all random numbers (as configured)")


def _chance(text: str) -> float | str:
    """A number, or the word `PAPER`."""
    try:
        return text if text == PAPER else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or {PAPER}, not {text!r}") from None


def _changed(options: argparse.Namespace, config: "RowConfig") -> "RowConfig":
    """A row as the options change it.

    Raises:
        ValueError: a value out of its range, or the paper has no such row to take alpha from.
    """
    from speculative.experiments import run

    changes = _changes(options, config.task)
    if options.simulated_alpha == PAPER:
        changes["simulated_alpha"] = run.paper_numbers(config)[0]
        if changes["simulated_alpha"] is None:
            raise ValueError(
                f"The paper has no alpha for {config.task} with {config.draft}; give a number "
                "(--simulated_alpha=A)."
            )
    return dataclasses.replace(config, **changes)


def _changes(options: argparse.Namespace, task: str) -> dict[str, Any]:
    """Fields of a task's `RowConfig` that the options change."""
    from speculative.tasks import TASKS

    files: dict[str, str] = {}
    for given in options.data_file:
        name, _, file = given.partition("=")
        files.update({name: file} if name in TASKS else {task: given})
    changes = {
        "checkpoints": options.weights or options.checkpoints,
        "simulated_alpha": options.simulated_alpha,
        "vocabulary": options.vocabulary,
        "num_examples": options.limit,
        "dtype": options.dtype,
        "seed": options.seed,
        "data_file": files.get(task),
    }
    if changes["checkpoints"] == DEMO:
        changes["checkpoints"] = None
    return {name: value for name, value in changes.items() if value is not None}


def _add_row(parser: argparse.ArgumentParser, default: str | None = SHIPPED_ROW) -> None:
    """One row, by its gin file."""
    add = parser.add_argument
    shown = f" ({default})" if default else ""
    add("--gin_file", required=default is None, default=default, help="the row" + shown)
    _add_bindings(parser, "it")
    _add_models(parser)


def _add_bindings(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--gin",
        action="append",
        default=[],
        metavar="BINDING",
        help=f"a binding that overrides {what}, like 'RowConfig.gamma = 3'",
    )


def _row(options: argparse.Namespace) -> "RowConfig":
    from speculative.experiments import settings

    return _changed(options, settings.parse(options.gin_file, options.gin))


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_row(parser, None)
    _add_texts(parser)
    parser.add_argument("--output_dir", default="results/run", metavar="DIR", help="(%(default)s)")


def _run(options: argparse.Namespace) -> None:
    from speculative.experiments import sweep

    file = pathlib.Path(options.gin_file)
    config = _row(options)
    _show(sweep.run({sweep.experiment(file): config}, pathlib.Path(options.output_dir)))


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="of the paper: 1, 2, 3 or 5; 4 has the rows of 2")
    _add_bindings(parser, "each row")
    _add_models(parser)
    _add_texts(parser)
    parser.add_argument("--output_dir", metavar="DIR", help="(results/tableN)")


def _table(options: argparse.Namespace) -> None:
    from rich.console import Console

    from speculative.experiments import figures, report, settings, sweep

    if options.table == "1":
        report.show_theory(figures.table_1(), Console())
        return
    table = "2" if options.table == "4" else options.table
    demo = options.checkpoints == DEMO
    files = [file for file in sweep.rows(table) if sweep.shipped(settings.parse(file)) == demo]
    configs = {sweep.experiment(file): settings.parse(file, options.gin) for file in files}
    _require_task_of_files(options, {config.task for config in configs.values()})
    configs = {name: _changed(options, config) for name, config in configs.items()}
    if not configs:
        raise ValueError(
            f"Table {table} has no row for these checkpoints; give a folder of checkpoints, or "
            "demo for the pair that ships (--checkpoints)."
        )
    folder = pathlib.Path(options.output_dir or f"results/table{options.table}")
    _show(sweep.run(configs, folder))


def _require_task_of_files(options: argparse.Namespace, tasks: set[str]) -> None:
    """Raises ValueError where it is not said which of several tasks a file is of."""
    for given in options.data_file:
        if len(tasks) > 1 and given.partition("=")[0] not in tasks:
            raise ValueError(
                f"--data_file {given} does not say of which task it is; put one of "
                f"{', '.join(sorted(tasks))} and = before the file."
            )


def _show(records: "list[Record]") -> None:
    from rich.console import Console

    from speculative.experiments import report

    report.show_records(records, Console())


def _add_tune(parser: argparse.ArgumentParser) -> None:
    _add_row(parser)
    _add_texts(parser)


def _tune(options: argparse.Namespace) -> None:
    from rich.console import Console

    from speculative.experiments import report, sweep

    report.show_tuning(*sweep.tuning(_row(options)), Console())


def _add_adapt(parser: argparse.ArgumentParser) -> None:
    _add_row(parser)
    _add_texts(parser)
    add = parser.add_argument
    add("--output", metavar="FILE", default="results/adaptive.jsonl", help="(%(default)s)")


def _adapt(options: argparse.Namespace) -> None:
    from rich.console import Console

    from speculative.experiments import adaptation, sweep

    found = sweep.adaptation(_row(options), pathlib.Path(options.output))
    adaptation.show(found, Console())
    print(f"Written: {options.output}.")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_row(parser)
    _add_texts(parser)
    add = parser.add_argument
    add("--samples", type=whole(1, 10**6), default=1024, help="first tokens a prompt (1024)")
    add("--false_alarm", type=float, default=0.001, metavar="P", help="(0.001)")
    add("--output", metavar="FILE", default="results/certificate.json", help="(%(default)s)")


def _verify(options: argparse.Namespace) -> int:
    from speculative.experiments import certificate, sweep

    if not 0 < options.false_alarm < 1:
        raise ValueError(f"--false_alarm must lie in (0, 1), not {options.false_alarm}.")
    config = _row(options)
    found: certificate.Certificate = sweep.certify(config, options.samples, options.false_alarm)
    found.save(pathlib.Path(options.output))
    print(found.verdict())
    print(f"Written: {options.output}.")
    return 0 if found.passed else 1


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_row(parser, None)
    add = parser.add_argument
    add(
        "--device",
        choices=["tpu_v4", "present"],
        default="tpu_v4",
        help="whose memory (tpu_v4, which has 32 GiB)",
    )
    add("--source_length", type=whole(1, 10**5), default=512, help="tokens of a source (512)")


def _plan(options: argparse.Namespace) -> int:
    from rich.console import Console

    from speculative.experiments import plan

    fits = plan.show(_row(options), options.device == "present", options.source_length, Console())
    return 0 if fits else 1


def _add_figure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("figure", type=whole(1, 5), help="of the paper, 1 to 5")
    add("--text", metavar="PROMPT", help="to decode in Figures 1 and 5 (the row's first)")
    add(
        "--records",
        action="append",
        default=[],
        metavar="FILE",
        help="records.jsonl whose rows Figures 2 to 4 show",
    )
    add("--output", metavar="FILE", help="(results/figures/figure_N.png, .html for Figure 1)")
    _add_row(parser)
    _add_texts(parser)


def _figure(options: argparse.Namespace) -> None:
    from rich.console import Console

    from speculative.experiments import draw

    kind = "html" if options.figure == 1 else "png"
    output = options.output or f"results/figures/figure_{options.figure}.{kind}"
    config = _row(options)
    draw.draw(
        options.figure, config, options.text, options.records, pathlib.Path(output), Console()
    )
    print(f"Written: {output}.")


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", metavar="PATH", help="a folder that demo, run or table wrote")
    add("--output", metavar="FILE", help="(report.html in the first folder)")


def _report(options: argparse.Namespace) -> None:
    from speculative.experiments import page

    folders = [pathlib.Path(folder) for folder in options.folders]
    output = pathlib.Path(options.output or folders[0] / "report.html")
    page.write(folders, output)
    print(f"Written: {output}.")


COMMANDS = {
    "run": Command("measure a row of a table, or go on with it", _add_run, _run),
    "table": Command("measure all rows of a table of the paper", _add_table, _table),
    "tune": Command("find the best gamma for a pair on a task", _add_tune, _tune),
    "adapt": Command("compare an adaptive gamma with fixed ones", _add_adapt, _adapt),
    "figure": Command("draw a figure of the paper, with measured points", _add_figure, _figure),
    "report": Command("write what was measured as one HTML page", _add_report, _report),
    "verify": Command("prove on a pair and a task that outputs are exact", _add_verify, _verify),
    "plan": Command("tell what a row needs of a device's memory", _add_plan, _plan),
}
