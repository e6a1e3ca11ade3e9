"""The paper's tables and figures, rerun from configurations."""

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from speculative import disk
from speculative.commands import Command, add_options, rows, whole

if TYPE_CHECKING:
    from speculative.rows.config import RowConfig


def _add_demo(parser: argparse.ArgumentParser) -> None:
    pair = ("--target", "--draft", "--vocabulary", "--dtype", "--seed", "--max_length")
    add_options(parser, *pair, "--output_dir", "--limit", seed=0, output_dir="results/demo")


def _demo(options: argparse.Namespace) -> None:
    from speculative.reporting import demo

    names = ("target", "draft", "dtype", "vocabulary", "seed", "max_length")
    settings = {name: getattr(options, name) for name in names}
    demo.run(pathlib.Path(options.output_dir), num_examples=options.limit, **settings)


def _add_run(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add_options(parser, "--output_dir", output_dir="results/run")


def _run(options: argparse.Namespace) -> None:
    _measure(dict([rows.row(options)]), pathlib.Path(options.output_dir))


def _measure(configs: dict[str, "RowConfig"], folder: pathlib.Path) -> None:
    """Measures rows, and shows them as tables and as a page."""
    from speculative.reporting import page, tables
    from speculative.studies import sweep

    if measured := sweep.run(configs, folder):
        tables.show_records(measured)
        page.write([folder], folder / "report.html")
        print(f"Written: {folder / 'records.jsonl'} and {folder / 'report.html'}.")


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="of the paper: 1, 2, 3 or 5; 4 has the rows of 2")
    rows.add_rows(parser)
    add_options(parser, "--family")
    parser.add_argument(
        "--verification",
        dest="rules",
        type=lambda text: text.split(","),
        metavar="RULE[,RULE]",
        help="how guesses are verified; several rules are compared, above temperature 0",
    )
    parser.add_argument("--output_dir", metavar="DIR", help="(results/tableN)")


def _table(options: argparse.Namespace) -> None:
    from speculative.reporting import tables

    if options.table == "1":
        tables.show_theory()
        return
    folder = options.output_dir or f"results/table{rows.table_name(options)}"
    _measure(rows.of_table(options), pathlib.Path(folder))


def _tune(options: argparse.Namespace) -> None:
    from speculative.reporting import tables
    from speculative.studies import sweep

    tables.show_tuning(sweep.tuning(rows.row(options)[1]))


def _add_verify(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add = parser.add_argument
    add("--samples", type=whole(1, 10**6), default=1024, help="beginnings of each prompt (1024)")
    add("--false_alarm", type=float, default=0.001, metavar="P", help="(0.001)")
    add("--output", metavar="FILE", default="results/certificate.json", help="(%(default)s)")


def _verify(options: argparse.Namespace) -> int:
    from speculative.studies import sweep

    if not 0 < options.false_alarm < 1:
        raise ValueError(f"--false_alarm must lie in (0, 1), not {options.false_alarm}.")
    config, output = rows.row(options)[1], disk.writable(options.output)
    found = sweep.certify(config, options.samples, options.false_alarm)
    found.save(output)
    print(found.verdict())
    print(f"Written: {output}.")
    return 0 if found.audit.passed else 1


def _add_plan(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    add_options(parser, "--source_length", "--topology")


def _plan(options: argparse.Namespace) -> int:
    from speculative.measurement import chips

    if options.topology == chips.PRESENT:
        chip = None
    else:
        chip = chips.chip(options.topology)
        chips.prepare()
    from speculative import progress
    from speculative.reporting import tables
    from speculative.rows import weights

    config = rows.row(options)[1]
    length = rows.source_length(options, config, 512)
    compiled = None
    if chip and chips.compiler_version() and len(weights.sizes(config)) == 2:
        from speculative.studies.compiled import Compiler

        with progress.bar(options.topology) as on_progress:
            on_progress("compiling", 0)
            given = dataclasses.replace(config, source_length=length)
            compiled = Compiler(options.topology).memory(given)
    return int(not tables.show_memory(config, chip, length, compiled))


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
    rows.add_row(parser)


def _figure(options: argparse.Namespace) -> None:
    from speculative.reporting import figures

    number, kind = options.figure, "html" if options.figure == 1 else "png"
    output = pathlib.Path(options.output or f"results/figures/figure_{number}.{kind}")
    figures.draw(number, rows.row(options)[1], options.text, options.records, output)
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
    "demo": Command("measure the speed-up on the shipped prompts and show it", _add_demo, _demo),
    "run": Command("measure a row of a table, or go on with it", _add_run, _run),
    "table": Command("measure all rows of a table of the paper", _add_table, _table),
    "tune": Command("find the best gamma for a pair on a task", rows.add_row, _tune),
    "figure": Command("draw a figure of the paper, with measured points", _add_figure, _figure),
    "report": Command("write what was measured as one HTML page", _add_report, _report),
    "verify": Command("test on a pair and a task that outputs are exact", _add_verify, _verify),
    "plan": Command("tell what a row needs of a device's memory", _add_plan, _plan),
}
