"""Measures the host memory of a process that decodes many texts of varied lengths and settings.

    python -m benchmarks.measure_memory --generations=1000

The texts are parts of the bundled prompts, from one word to a whole prompt or several in a row.
Every other one is sampled, with its own temperature, top-p and maximum; the rest are greedy, and
every tenth is streamed. Memory grows while programs for the lengths that occur are compiled, and
then levels off.
"""

import argparse
import os
import pathlib
import random
from typing import Any

from rich.console import Console
from rich.table import Table

from speculative import load
from speculative.tasks.prompts import load_prompts


def resident() -> int:
    """The resident size of this process in MiB; ValueError where this is not Linux."""
    file = pathlib.Path("/proc/self/statm")
    if not file.is_file():
        raise ValueError(f"{file} does not exist; this runs on Linux only.")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--generations", type=int, default=1000, help="texts decoded (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (0)")
    options = parser.parse_args()
    rng, pair = random.Random(options.seed), load()
    prompts = load_prompts("debian_synopsis")
    words = [word for prompt in prompts for word in prompt.source.split() * 2]
    table, tokens = Table("generations", "resident MiB", "output tokens"), 0
    table.add_row("0", str(resident()), "0")
    for number in range(1, options.generations + 1):
        first, length = rng.randrange(len(words)), int(2 ** rng.uniform(0, 8))
        text = " ".join(words[first : first + length])
        settings: dict[str, Any] = {
            "example": number,
            "source_length": 512,
            "max_length": rng.randrange(16, 129),
        }
        if number % 2:
            settings |= {"temperature": rng.uniform(0.3, 1.5), "top_p": rng.choice([1.0, 0.9, 0.8])}
        if number % 10:
            tokens += len(pair.generate(text, **settings).tokens)
        else:
            tokens += sum(int(step.count[0]) for step in pair.stream(text, **settings))
        if number % max(1, options.generations // 10) == 0:
            table.add_row(str(number), str(resident()), f"{tokens:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
