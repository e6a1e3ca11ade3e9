"""Checks that the bundled models' texts are the same in batches as one by one.

    python -m benchmarks.equal_texts
    XLA_FLAGS=--xla_cpu_max_isa=AVX2 python -m benchmarks.equal_texts --machine=x86-64-v3

It decodes all prompts for every row of the bundled models' Table 3, at T = 0 and 1, with each rule
of verification, in batches of several sizes, each in a different order. With `--machine` the CPU
kernels are compiled for such a machine. The record is `equal.json`.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.compare_peers import recorded
from speculative import progress
from speculative.backends.cpu import kernels
from speculative.checks import MAX_BATCH
from speculative.commands import whole
from speculative.decoding.rules import RULES
from speculative.pair import Pair, Request
from speculative.rows import memory
from speculative.rows.config import gamma_of
from speculative.rows.weights import Loader
from speculative.settings import Settings
from speculative.studies import sweep
from speculative.tasks.prompts import load_prompts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare texts decoded in batches and one by one.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--output_dir", default="results/equal_texts", metavar="DIR", help="(%(default)s)")
    add("--rows", default="", metavar="WORD", help="rows whose names have this word (all)")
    size = whole(2, MAX_BATCH)
    add("--batch_sizes", type=size, nargs="+", default=[8, 32], metavar="N", help="(8 32)")
    add("--machine", metavar="NAME", help="as for the compiler's -march (this one)")
    return parser.parse_args(arguments)


def unequal(pair: Pair, requests: Sequence[Request], sizes: Sequence[int]) -> list[int]:
    """The number of results that differ from those of one-by-one decoding, for each batch size."""
    alone = pair.decode_all(requests, batch_size=1)
    counts = []
    for size in sizes:
        order = np.random.default_rng(size).permutation(len(requests)).tolist()
        together = pair.decode_all([requests[i] for i in order], batch_size=size)
        counts.append(sum(one != alone[i] for one, i in zip(together, order, strict=True)))
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.machine:
        replaced = {kernels.NATIVE: f"-march={options.machine}"}
        kernels.FLAGS = tuple(replaced.get(flag, flag) for flag in kernels.FLAGS)
    output, load = pathlib.Path(options.output_dir), Loader()
    output.mkdir(parents=True, exist_ok=True)
    shipped = sweep.shipped_rows("3")
    chosen = {name: config for name, config in shipped.items() if options.rows in name}
    if not chosen:
        raise SystemExit(f"No row has {options.rows!r} in its name (--rows).")
    rows: list[dict[str, Any]] = []
    with progress.bar("rows") as on_progress:
        for number, (name, config) in enumerate(chosen.items()):
            on_progress(name, number / len(chosen))
            memory.spare_maps()
            pair, prompts = load(config), load_prompts(config.task)
            sources = [prompt.source for prompt in prompts]
            for rule in RULES:
                how = Settings(
                    gamma=gamma_of(config, name),
                    temperature=config.temperature,
                    verification=rule,
                    max_length=config.max_length,
                    seed=config.seed,
                    source_length=512,
                )
                requests = pair.requests(sources, how)
                others = unequal(pair, requests, options.batch_sizes)
                row = {"row": name, "verification": rule}
                row |= {"texts": len(requests), "unequal": others}
                rows.append(row)
                (output / "equal.json").write_text(recorded(options, rows=rows))
    texts, others = (sum(np.sum(row[name]) for row in rows) for name in ("texts", "unequal"))
    print(
        f"{texts} texts in {len(rows)} ways of decoding, each in batches of "
        f"{', '.join(map(str, options.batch_sizes))}: {others} differ from those decoded alone."
    )
    print(f"Written: {output / 'equal.json'}.")


if __name__ == "__main__":
    main()
