"""The paper's tables and figures, rerun from configurations."""

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from speculative import disk
from speculative.commands import Command, add_options, whole

if TYPE_CHECKING:
    from speculative.rows.config import RowConfig

DEMO = "demo"  # Instead of a folder of checkpoints: the pair that ships.
PAPER = "paper"  # Instead of a probability of acceptance: that of the paper's own row.
ROWS = pathlib.Path(__file__).parents[2] / "configs" / "runs"
SHIPPED_ROW = str(ROWS / "table2.gin:debian_ende_t0")


def _add_rows(parser: argparse.ArgumentParser, texts: bool = True) -> None:
    """What a command may change of rows: their settings, their models and, maybe, their texts."""
    add = parser.add_argument
    parser.set_defaults(data_file=[], limit=None, seed=None)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--checkpoints", metavar="DIR", help="folder of checkpoints, or demo")
    add_options(models, "--weights")
    add(
        "--simulated_alpha",
        type=_probability,
        metavar="A",
        help="accept guesses with this probability, or with each row's in the paper: only times "
        "are real",
    )
    add_options(parser, "--gin", "--vocabulary", "--dtype")
    if texts:
        add(
            "--data_file",
            action="append",
            metavar="[TASK=]FILE",
            help="texts of a task: .tsv, .jsonl, or two parallel files with a comma between",
        )
        add_options(parser, "--limit", "--seed")


def _add_row(
    parser: argparse.ArgumentParser, default: str | None = SHIPPED_ROW, texts: bool = True
) -> None:
    """One row, by its gin file, and by its name there where the file is a table."""
    said = "the row, and its name where the file has several" + f" ({default})" * bool(default)
    required, shown = default is None, "FILE[:ROW]"
    parser.add_argument("--gin_file", required=required, default=default, metavar=shown, help=said)
    _add_rows(parser, texts)


def _probability(text: str) -> float | str:
    """A number, or the word `PAPER`."""
    try:
        return text if text == PAPER else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or {PAPER}, not {text!r}") from None


def _changed(options: argparse.Namespace, config: "RowConfig") -> "RowConfig":
    """A row as the options change it."""
    from speculative.rows import run
    from speculative.tasks import TASKS

    files: dict[str, str] = {}
    for given in options.data_file:
        name, _, file = given.partition("=")
        files |= {name: file} if name in TASKS else {config.task: given}
    alpha = options.simulated_alpha
    if alpha == PAPER and (alpha := run.paper_numbers(config)[0]) is None:
        raise ValueError(
            f"The paper has no alpha for {config.task} with {config.draft}; give a number "
            "(--simulated_alpha=A)."
        )
    folder = None if options.checkpoints == DEMO else options.checkpoints
    changes = {
        "checkpoints": options.weights or folder,
        "simulated_alpha": alpha,
        "vocabulary": options.vocabulary,
        "num_examples": options.limit,
        "dtype": options.dtype,
        "seed": options.seed,
        "data_file": files.get(config.task),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(config, **given)


def _row(options: argparse.Namespace) -> "RowConfig":
    from speculative.rows.config import read_row

    return _changed(options, read_row(options.gin_file, options.gin))


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_row(parser, None)
    add_options(parser, "--output_dir", output_dir="results/run")


def _run(options: argparse.Namespace) -> None:
    from speculative.reporting import tables
    from speculative.rows.config import experiment
    from speculative.studies import sweep

    rows = {experiment(options.gin_file): _row(options)}
    tables.show_records(sweep.run(rows, pathlib.Path(options.output_dir)))


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="of the paper: 1, 2, 3 or 5; 4 has the rows of 2")
    _add_rows(parser)
    parser.add_argument("--output_dir", metavar="DIR", help="(results/tableN)")


def _table(options: argparse.Namespace) -> None:
    from speculative.reporting import tables
    from speculative.rows.config import experiment, read_row
    from speculative.studies import sweep

    if options.table == "1":
        tables.show_theory()
        return
    table = "2" if options.table == "4" else options.table
    demo = options.checkpoints == DEMO
    rows = [row for row in sweep.rows(table) if sweep.shipped(read_row(row)) == demo]
    configs = {experiment(row): read_row(row, options.gin) for row in rows}
    tasks = sorted({config.task for config in configs.values()})
    for given in options.data_file:
        if len(tasks) > 1 and given.partition("=")[0] not in tasks:
            raise ValueError(
                f"--data_file {given} does not say of which task it is; put one of "
                f"{', '.join(tasks)} and = before the file."
            )
    configs = {name: _changed(options, config) for name, config in configs.items()}
    if not configs:
        raise ValueError(
            f"Table {table} has no row for these checkpoints; give a folder of checkpoints, or "
            "demo for the pair that ships (--checkpoints)."
        )
    folder = pathlib.Path(options.output_dir or f"results/table{options.table}")
    tables.show_records(sweep.run(configs, folder))


def _tune(options: argparse.Namespace) -> None:
    from speculative.reporting import tables
    from speculative.studies import sweep

    tables.show_tuning(*sweep.tuning(_row(options)))


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_row(parser)
    add = parser.add_argument
    add("--samples", type=whole(1, 10**6), default=1024, help="first tokens a prompt (1024)")
    add("--false_alarm", type=float, default=0.001, metavar="P", help="(0.001)")
    add("--output", metavar="FILE", default="results/certificate.json", help="(%(default)s)")


def _verify(options: argparse.Namespace) -> int:
    from speculative.studies import certificate, sweep

    if not 0 < options.false_alarm < 1:
        raise ValueError(f"--false_alarm must lie in (0, 1), not {options.false_alarm}.")
    config, output = _row(options), disk.writable(options.output)
    found: certificate.Certificate = sweep.certify(config, options.samples, options.false_alarm)
    found.save(output)
    print(found.verdict())
    print(f"Written: {output}.")
    return 0 if found.passed else 1


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_row(parser, None, texts=False)
    add = parser.add_argument
    add(
        "--device",
        choices=["tpu_v4", "present"],
        default="tpu_v4",
        help="whose memory (tpu_v4, which has 32 GiB)",
    )
    add("--source_length", type=whole(1, 10**5), default=512, help="tokens of a source (512)")


def _plan(options: argparse.Namespace) -> int:
    from speculative.reporting import tables

    present = options.device == "present"
    return int(not tables.show_memory(_row(options), present, options.source_length))


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


def _figure(options: argparse.Namespace) -> None:
    from speculative.reporting import figures

    number, kind = options.figure, "html" if options.figure == 1 else "png"
    output = pathlib.Path(options.output or f"results/figures/figure_{number}.{kind}")
    figures.draw(number, _row(options), options.text, options.records, output)
    print(f"Written: {output}.")


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", metavar="PATH", help="a folder that demo, run or table wrote")
    add("--output", metavar="FILE", help="(report.html in the first folder)")


def _report(options: argparse.Namespace) -> None:
    from speculative.reporting import page

    folders = [pathlib.Path(folder) for folder in options.folders]
    output = pathlib.Path(options.output or folders[0] / "report.html")
    page.write(folders, output)
    print(f"Written: {output}.")


COMMANDS = {
    "run": Command("measure a row of a table, or go on with it", _add_run, _run),
    "table": Command("measure all rows of a table of the paper", _add_table, _table),
    "tune": Command("find the best gamma for a pair on a task", _add_row, _tune),
    "figure": Command("draw a figure of the paper, with measured points", _add_figure, _figure),
    "report": Command("write what was measured as one HTML page", _add_report, _report),
    "verify": Command("test on a pair and a task that outputs are exact", _add_verify, _verify),
    "plan": Command("tell what a row needs of a device's memory", _add_plan, _plan),
}
