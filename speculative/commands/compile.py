"""`compile`: TPU compiler estimates of a row or a training run, without a TPU."""

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

from speculative import checks
from speculative.commands import Command, add_options, option, rows


def _add_compile(parser: argparse.ArgumentParser) -> None:
    rows.add_row(parser)
    option(parser, "--table N", "all rows of a table of the paper, instead of one row")
    option(
        parser,
        "--config FILE.gin",
        "a training run, instead of a row: memory, time per step, share of the peak and "
        "chip-hours, on --mesh or else the best mesh; --gin overrides it",
    )
    add_options(parser, "--family", "--topology", "--batch_size", batch_size=1)
    parser.add_argument(
        "--json", action="store_true", help="print an object per row, once it is done"
    )


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

    if options.config:
        return _compile_training(options)
    checks.jax_settings()
    if options.topology == chips.PRESENT:
        loading.enable_compilation_cache()
    else:  # The cache could store programs for an absent TPU, but not load them again.
        jax.config.update("jax_enable_compilation_cache", False)
    configs = dict([rows.row(options)]) if options.table is None else rows.of_table(options)
    estimates, compiler = [], Compiler(options.topology, options.batch_size)
    for number, (name, config) in enumerate(configs.items(), 1):
        row = f"{number} of {len(configs)}, {name.rpartition('/')[2]}"
        with progress.bar(f"{row}, {options.topology}") as on_progress:
            estimates.append(compiler.estimate(name, config, on_progress))
        if options.json:
            print(json.dumps(dataclasses.asdict(estimates[-1])), flush=True)
    if not options.json:
        reporting.show(estimates)
    faults = [one.fault for one in estimates if one.fault]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _compile_training(options: argparse.Namespace) -> int:
    import jax

    from speculative import progress
    from speculative.measurement import chips
    from speculative.reporting import compiled as reporting
    from speculative.studies import compiled_training as study
    from speculative.training import recipes
    from speculative.training.train import train

    if options.topology == chips.PRESENT:
        raise ValueError("--config needs a topology by name, such as --topology=v4-32.")
    values, usual = vars(options), {"batch_size": 1}
    named = {"gin_file", "table", "checkpoints", "weights", "simulated_alpha", "data_file"}
    named |= {"module", "limit", "family", *rows.FIELDS} - {"mesh"}  # A run has a mesh too.
    if others := [f"--{x}" for x in sorted(named) if values.get(x) not in (None, usual.get(x))]:
        raise ValueError(f"{', '.join(others)}: only for a row, not for a training run (--config).")
    jax.config.update("jax_enable_compilation_cache", False)
    folders: dict[str, Any] = dict.fromkeys(("data_dir", "work_dir", "out_dir"), "")
    parameters = recipes.configured(train, options.config, options.gin or [], folders)
    model, config = parameters["model"], parameters["config"]
    loss = {name: parameters[name] for name in ("label_smoothing", "z_loss") if name in parameters}
    name, estimates = pathlib.PurePath(options.config).stem, list[study.TrainingEstimate]()
    meshes = [options.mesh] if options.mesh else study.meshes(options.topology, config)
    for number, mesh in enumerate(meshes, 1):
        with progress.bar(f"{mesh}, {number} of {len(meshes)}, {options.topology}") as on_progress:
            run = name, model, config, options.topology, mesh
            estimates.append(study.estimate(*run, **loss, on_progress=on_progress))
    fastest = study.best(estimates)
    if options.json:
        for one in [fastest] if fastest else estimates:
            print(json.dumps(dataclasses.asdict(one)), flush=True)
    else:
        reporting.show_training(estimates)
    if fastest is None:
        for one in estimates:
            print(f"error: {one.fault}", file=sys.stderr)
        return 2
    return 0


COMMANDS = {
    "compile": Command("compile a row for a TPU that need not be present", _add_compile, _compile)
}
