"""The paper's tables, rerun from configurations."""

import argparse
import pathlib
from typing import TYPE_CHECKING

from speculative.commands import Command, add_options, nodes, option, rows

if TYPE_CHECKING:
    from speculative.rows.config import RowConfig


DEMO = ("--target", "--draft", *rows.MODELS, "--seed", "--max_length")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add_options(parser, *DEMO, "--output_dir", "--limit", seed=0, output_dir="results/demo")


def _demo(options: argparse.Namespace) -> None:
    from speculative.commands import demo

    names = [name.removeprefix("--") for name in DEMO]
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
        try:  # Neither page nor terminal can lose the other.
            page.write([folder], folder / "report.html")
        finally:
            tables.show_records(measured)
        print(f"Written: {folder / 'records.jsonl'} and {folder / 'report.html'}.")


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="of the paper: 1, 2, 3 or 5; 4 has the rows of 2")
    rows.add_rows(parser)
    add_options(parser, "--family")
    said = "how guesses are verified; several rules are compared, above temperature 0"
    option(parser, "--verification RULE[,RULE]", said, lambda text: text.split(","), dest="rules")
    said = "each row with trees of so many guesses too, above temperature 0 verified by coupled; "
    said += "auto is as many as the device verifies in the time of few"
    option(parser, "--tree N", said, nodes)
    option(parser, "--output_dir DIR", "(results/tableN)")


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


def _add_report(parser: argparse.ArgumentParser) -> None:
    said = "a folder that demo, run or table wrote"
    parser.add_argument("folders", nargs="+", metavar="PATH", help=said)
    option(parser, "--output FILE", "(report.html in the first folder)")


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
    "report": Command("write what was measured as one HTML page", _add_report, _report),
}
