"""`compile`: what the TPU's compiler makes of a row's programs, on a machine without a TPU."""

import argparse
import dataclasses
import json
import sys

from speculative import checks
from speculative.commands import Command, add_options, option, rows


def _add_compile(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    option(parser, "--table N", "all rows of a table of the paper, instead of one row")
    add_options(parser, "--family", "--topology", "--batch_size", batch_size=1)
    parser.add_argument("--json", action="store_true", help="one object a row, as it is done")


def _compile(options: argparse.Namespace) -> int:
    from speculative.measurement import chips

    chips.chip(options.topology)
    if options.topology != chips.PRESENT:
        chips.require_compiler()
        chips.prepare()

    import jax

    from speculative import loading, progress
    from speculative.reporting import compiled as reporting
    from speculative.studies.compiled import Compiler

    checks.jax_settings()
    if options.topology == chips.PRESENT:
        loading.enable_compilation_cache()
    else:  # Programs for a TPU that is not there could be written, but not read again.
        jax.config.update("jax_enable_compilation_cache", False)
    configs = dict([rows.row(options)]) if options.table is None else rows.of_table(options)
    found, compiler = [], Compiler(options.topology, options.batch_size)
    for number, (name, config) in enumerate(configs.items(), 1):
        row = f"{number} of {len(configs)}, {name.rpartition('/')[2]}"
        with progress.bar(f"{row}, {options.topology}") as on_progress:
            found.append(compiler.estimate(name, config, on_progress))
        if options.json:
            print(json.dumps(dataclasses.asdict(found[-1])), flush=True)
    if not options.json:
        reporting.show(found)
    faults = [one.fault for one in found if one.fault]
    for fault in faults:
        print("error:", fault, file=sys.stderr)
    return 2 if faults else 0


COMMANDS = {
    "compile": Command("compile a row for a TPU that need not be there", _add_compile, _compile)
}
