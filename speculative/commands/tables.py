"""The paper's tables, rerun from configurations."""

import argparse
import contextlib
import os
import pathlib
from typing import TYPE_CHECKING

from speculative.commands import Command, add_options, nodes, option, rows, whole

if TYPE_CHECKING:
    from speculative.rows.config import RowConfig
    from speculative.rows.records import Record


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
    """Measures rows and shows them as tables and as a page."""
    from speculative.studies import sweep

    _show(sweep.run(configs, folder), folder)


def _show(measured: "list[Record]", folder: pathlib.Path) -> None:
    from speculative.reporting import page, tables

    if measured:
        try:  # The tables are shown even if the page fails.
            page.write([folder], folder / "report.html")
        finally:
            tables.show_records(measured)
        print(f"Written: {folder / 'records.jsonl'} and {folder / 'report.html'}.")


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="number in the paper: 1, 2, 3 or 5; 4 has the rows of 2")
    rows.add_rows(parser)
    add_options(parser, "--family")
    text = "how guesses are verified; several rules are compared above temperature 0"
    option(parser, "--verification RULE[,RULE]", text, lambda text: text.split(","), dest="rules")
    text = "also measure each row with trees of N guesses, which above temperature 0 are verified "
    text += "by coupled; auto is as many as the device verifies in about the time of a few"
    option(parser, "--tree N", text, nodes)
    text = "processes that share each row's texts; each has a device, a mesh of devices or its "
    text += "share of the cores; auto is as many as there are (one process)"
    option(parser, "--workers N", text, _workers)
    text = "with --workers: this host's number, from 0, and the number of hosts that share the "
    text += "texts, each with its own folder; report merges folders copied into one (0/1)"
    option(parser, "--hosts K/N", text, _host, default=(0, 1))
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # K/N, for processes started here.
    option(parser, "--output_dir DIR", "folder for the results (results/tableN)")


def _table(options: argparse.Namespace) -> None:
    from speculative.reporting import tables

    if options.table == "1":
        tables.show_theory()
        return
    folder = options.output_dir or f"results/table{rows.table_name(options)}"
    if options.hosts != (0, 1) and options.workers is None and options.worker is None:
        raise ValueError("--hosts is for workers; add --workers=auto.")
    if options.worker is not None:
        _work(options, pathlib.Path(folder))
    elif options.workers is not None:
        _share(options, pathlib.Path(folder))
    else:
        _measure(rows.of_table(options), pathlib.Path(folder))


def _workers(text: str) -> str:
    return text if text == "auto" else str(whole(1, 1024)(text))


def _host(text: str) -> tuple[int, int]:
    with contextlib.suppress(ValueError):
        number, hosts = map(int, text.split("/"))
        if 0 <= number < hosts <= 1024:
            return number, hosts
    raise argparse.ArgumentTypeError(f"must be K/N with K from 0 to N - 1, not {text!r}")


def _work(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Runs one of several workers."""
    from speculative.studies import sweep, workers

    worker, of = map(int, options.worker.split("/"))
    workers.end_with_parent()
    host, each = options.hosts[0], of // options.hosts[1]
    workers.take_cores(worker - host * each, each)
    own = range(host * each, (host + 1) * each)
    sweep.work(rows.of_table(options), folder, worker, of, own)


def _share(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Starts workers; when they have ended, measures costs without them and shows all."""
    from speculative import checks, disk
    from speculative.reporting import page
    from speculative.rows.config import RANDOM
    from speculative.studies import sweep, workers
    from speculative.tasks.prompts import load_prompts

    # Count before anything asks JAX for its devices, which this process would then hold.
    platform, count = workers.count(options.workers, options.mesh)
    options.platform = platform
    configs = rows.of_table(options)
    devices, texts = checks.devices(options.mesh), {}
    for name, config in configs.items():
        random = config.checkpoints == RANDOM and config.vocabulary is None
        prompts = None if random else load_prompts(config.texts, config.num_examples)
        texts[name] = config.samples * sweep.number_of_texts(config, prompts)
    arguments = _without_workers(options.arguments)
    with disk.owned(folder):
        sweep.begin_workers(folder, count * options.hosts[1])
        workers.run(arguments, folder, platform, count, devices, texts, options.hosts)
        os.environ.update(workers.pins(platform, 0, devices))
        host, hosts = options.hosts
        if hosts == 1:
            _show(sweep.finish(configs, folder), folder)
            return
        own = range(host * count, (host + 1) * count)  # Other hosts have the other texts.
        sweep.work(configs, folder, own[0], hosts * count, own)  # Texts left by dead workers.
        page.write([folder], folder / "report.html")
        print(f"Written: {folder / 'report.html'}, of this host's texts.")


def _without_workers(arguments: list[str]) -> list[str]:
    """The arguments of a command without `--workers` and its value."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--workers":
            next(words)
        elif not word.startswith("--workers="):
            kept.append(word)
    return kept


def _tune(options: argparse.Namespace) -> None:
    from speculative.reporting import tables
    from speculative.studies import sweep

    tables.show_tuning(sweep.tuning(rows.row(options)[1]))


def _add_report(parser: argparse.ArgumentParser) -> None:
    text = "a folder that demo, run or table wrote"
    parser.add_argument("folders", nargs="+", metavar="PATH", help=text)
    option(parser, "--output FILE", "page to write (report.html in the first folder)")


def _report(options: argparse.Namespace) -> None:
    from speculative.reporting import page

    folders = [pathlib.Path(folder) for folder in options.folders]
    output = pathlib.Path(options.output or folders[0] / "report.html")
    page.write(folders, output)
    print(f"Written: {output}.")


COMMANDS = {
    "demo": Command("measure and show the speed-up on the bundled prompts", _add_demo, _demo),
    "run": Command("measure a row of a table, or resume it", _add_run, _run),
    "table": Command("measure all rows of a table of the paper", _add_table, _table),
    "tune": Command("find the best gamma for a pair on a task", rows.add_row, _tune),
    "report": Command("write measurements as one HTML page", _add_report, _report),
}
