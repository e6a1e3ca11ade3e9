"""Times the bundled pair's steps with and without each part of the CPU path.

    python -m benchmarks.ablate_cpu --output=results/ablation/ablation.json

Variants take turns, each in its own process; the table shows the median of the rounds. The run
takes about ten minutes; nothing else should run meanwhile.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from rich.console import Console

from benchmarks.compare_peers import table
from speculative import loading
from speculative.backends.cpu import kernels
from speculative.commands import whole
from speculative.commands.rows import SHIPPED_ROW
from speculative.rows import environment
from speculative.rows.config import read_row
from speculative.studies import bench

GAMMA, WIDE = 5, 8
# Times in milliseconds: passes of the target and of the draft, and a step of decoding.
MEASURES = ("pass, 1 position", f"pass, {WIDE} positions", "draft pass", f"step, γ = {GAMMA}")


def _kernels(file: str, old: str, new: str) -> None:
    """Compiles the kernels with one of their files changed."""
    with tempfile.TemporaryDirectory() as folder:
        for source in kernels.SOURCE.parent.glob("*.[ch]*"):
            shutil.copy(source, folder)
        changed = pathlib.Path(folder) / file
        text = changed.read_text()
        assert old in text, old
        changed.write_text(text.replace(old, new))
        kernels.SOURCE = pathlib.Path(folder) / "kernels.cc"
        assert kernels.native()


def _xla() -> None:
    """Disables our own kernels, as on a machine without a compiler."""
    os.environ["CXX"] = "false"


def _float32_draft() -> None:
    loading.usual_quantize = lambda: "none"


VARIANTS: dict[str, Callable[[], None]] = {
    "as it is": lambda: None,
    "a draft in float32": _float32_draft,
    "no prefetch": lambda: _kernels("product.h", "__builtin_prefetch(ahead", "(void)(ahead"),
    "threads that are woken": lambda: _kernels("threads.h", "kLooks = 4000", "kLooks = 0"),
    "XLA": _xla,
}


def _measure(variant: str) -> list[float]:
    VARIANTS[variant]()
    bench.GAMMAS = (GAMMA,)
    config = dataclasses.replace(read_row(SHIPPED_ROW), max_length=64)
    widths = 1, WIDE
    measured = bench.bench(config, widths, bench.resolve(config, widths), lambda what, share: None)
    step = measured.costs.ms_verify[GAMMA] + measured.costs.ms_proposal[GAMMA]
    return [*(one.ms for one in measured.passes), measured.draft_passes[0].ms, step]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decoding without parts of the CPU path.")
    parser.add_argument("--output", default="results/ablation/ablation.json", metavar="FILE")
    parser.add_argument("--rounds", type=whole(1, 100), default=3)
    options = parser.parse_args()
    output = pathlib.Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    times: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name in VARIANTS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                times[name].append(pool.submit(_measure, name).result())
    medians = {name: np.median(rounds, axis=0).tolist() for name, rounds in times.items()}
    shown = table("ms, and the ratio to the complete path", "without", *MEASURES)
    complete = medians["as it is"]
    for name, row in medians.items():
        cells = (f"{ms:.3f} ({ms / all_:.2f})" for ms, all_ in zip(row, complete, strict=True))
        shown.add_row(name, *cells)
    Console(width=110).print(shown)
    machine = {"commit": environment.commit(), "device": environment.device()}
    contents = {"measures": list(MEASURES), "ms": medians, "rounds": times} | machine
    output.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    print(f"Written: {output}.")


if __name__ == "__main__":
    main()
