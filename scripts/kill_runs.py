"""Kills runs (SIGKILL) at random moments, goes on with them, and compares what they leave.

    python scripts/kill_runs.py --sweep=20 --conversion=10 --training=5 --seed=0

A sweep, a conversion and a training run each run once undisturbed. Then they are killed and started
again until as many kills are done as asked for; half of the moments are a random time, half come
right after a random number of changes in the folder. After each kill the lines of JSON are read,
the conversion's destination must be missing or whole, and a file and a folder of the user's must
be as they were. What a finished run leaves must equal what the undisturbed one left, times apart.
Exits with 1 if anything differs.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speculative import checkpoints, disk
from speculative.rows import kept, records
from speculative.training import examples

ROOT = pathlib.Path(__file__).parents[1]
SPECULATIVE = [sys.executable, "-m", "speculative.cli"]
MINE = {"mine.txt": "mine", "out.unfinished/notes.txt": "notes", ".unfinished-mine/a": "b"}
"""Files of the user's, with names as a careless program would use for its own."""
TIMED = ("c", "verify_cost", "seconds", "started_at", "tokens_per_second")

TRAINING = {
    "config.T5Config.emb_dim": 16,
    "config.T5Config.mlp_dim": 16,
    "config.T5Config.num_encoder_layers": 1,
    "config.T5Config.num_decoder_layers": 1,
    "loop.TrainConfig.steps": 60,
    "loop.TrainConfig.source_length": 24,
    "loop.TrainConfig.target_length": 24,
    "loop.TrainConfig.warmup_steps": 1,
    "loop.TrainConfig.log_every": 2,
    "loop.TrainConfig.evaluate_every": 10,
    "loop.TrainConfig.checkpoint_every": 10,
    "train.train.max_length": 8,
}


Moment = tuple[float | None, int | None]
"""When a run is killed: after so many seconds, or so many changes of its folder."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A run that can be killed and go on."""

    command: Callable[[pathlib.Path], list[str]]  # From the folder that it writes to.
    found: Callable[[pathlib.Path], Any]  # What a finished run left there, without times.
    # Whether a killed run had finished; ValueError if it left something damaged.
    left: Callable[[pathlib.Path], bool]


def sweep(folder: pathlib.Path) -> list[str]:
    """Four rows of the shipped pair."""
    more = ["--limit", "3", "--gin", "RowConfig.rounds = 1", "--output_dir", str(folder / "out")]
    return [*SPECULATIVE, "table", "2", "--checkpoints", "demo", *more]


def conversion(folder: pathlib.Path) -> list[str]:
    """The shipped target into T5X's format, which has a folder for each tensor."""
    return [*SPECULATIVE, "convert", "debian_target", str(folder / "out"), "--to", "t5x"]


def training(folder: pathlib.Path) -> list[str]:
    """A tiny model of random text: steps, checkpoints, log, the saved model, test outputs."""
    bindings = [f"--gin={name}={value}" for name, value in TRAINING.items()]
    folders = [f"--work_dir={folder / 'work'}", f"--out_dir={folder / 'out'}"]
    script = [
        str(ROOT / "scripts" / "train.py"),
        f"--config={ROOT / 'configs/training/target.gin'}",
    ]
    return [sys.executable, *script, f"--data_dir={folder.parent}", *folders, *bindings]


def write_text(folder: pathlib.Path) -> None:
    """The tokenised files that the training run reads."""
    rng = np.random.default_rng(0)
    for task in ("debian_ende", "debian_synopsis"):
        for split, count in (("train", 60), ("validation", 9), ("test", 5)):
            rows = [rng.integers(3, 8000, rng.integers(4, 20)) for _ in range(2 * count)]
            made = examples.ragged(rows[:count], rows[count:])
            made.save(folder / f"{task}_{split}.npz")


def untimed(fields: dict[str, Any]) -> dict[str, Any]:
    """A line of JSON without what differs from run to run."""
    kept = [n for n in fields if n not in TIMED and not n.startswith(("ms_", "speedup"))]
    return {name: fields[name] for name in kept}


def measured(folder: pathlib.Path) -> Any:
    """Records and examples of a sweep."""
    rows = [untimed(dataclasses.asdict(row)) for row in records.read(folder / "out/records.jsonl")]
    of = {}
    for file in sorted((folder / "out/rows").rglob("examples.jsonl")):
        lines = [untimed(dataclasses.asdict(each)) for each in kept.read(file.parent)]
        of[file.parent.name] = sorted(lines, key=lambda line: line["number"])
    return rows, of


def contents(folder: pathlib.Path) -> dict[str, str]:
    """The hash of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trained(folder: pathlib.Path) -> Any:
    """The saved model, the log, and the outputs and scores of the tests."""
    log = disk.entries(folder / "work/log.jsonl", untimed, "line of a log")
    outputs = {
        path.name: [list(map(list, pair)) for pair in examples.load(path)]
        for path in sorted((folder / "work").glob("*.npz"))
    }
    return (
        log,
        contents(folder / "out"),
        outputs,
        json.loads((folder / "work/scores.json").read_text()),
    )


def sweep_left(folder: pathlib.Path) -> bool:
    """Every line must be whole, but for the last; the same command goes on."""
    measured(folder)
    return False


def conversion_left(folder: pathlib.Path) -> bool:
    """The destination is missing or whole, so that there is nothing to go on with."""
    return (folder / "out").exists()


def training_left(folder: pathlib.Path) -> bool:
    """The log must be readable, and the model, if it is there; the same command goes on."""
    disk.entries(folder / "work/log.jsonl", untimed, "line of a log")
    if (folder / "out").exists():
        checkpoints.open(folder / "out").numpy()
    return False


WORKS = {
    "sweep": Work(sweep, measured, sweep_left),
    "conversion": Work(conversion, lambda folder: contents(folder / "out"), conversion_left),
    "training": Work(training, trained, training_left),
}


def begun(work: Work, folder: pathlib.Path) -> subprocess.Popen[bytes]:
    """A run under way."""
    command, nowhere = work.command(folder), subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdout=nowhere, stderr=subprocess.PIPE)


def listing(folder: pathlib.Path) -> list[tuple[str, int]]:
    """All files with their sizes; changes while it is made do no harm."""
    found = []
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                found.append((path := os.path.join(place, file), os.stat(path).st_size))
            except FileNotFoundError:
                continue
    return found


def moments(rng: random.Random, seconds: float, changes: int) -> Iterator[Moment]:
    """Random moments of a run that takes so many seconds and changes of its folder."""
    while True:
        at = rng.uniform(0.5, seconds), rng.randint(1, changes)
        yield (at[0], None) if rng.random() < 0.5 else (None, at[1])


def watched(process: subprocess.Popen[bytes], folder: pathlib.Path, moment: Moment) -> int:
    """Kills a run at a moment, if it has not ended before; the changes of its folder."""
    seconds, most = moment
    since, before, changes = time.monotonic(), listing(folder), 0
    while process.poll() is None:
        now = listing(folder)
        changes += now != before
        before = now
        if changes == most or (seconds and time.monotonic() - since > seconds):
            process.kill()
            break
        time.sleep(0.001)
    return changes


def fresh(folder: pathlib.Path) -> pathlib.Path:
    """An empty folder but for the user's files."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in MINE.items():
        disk.write(folder / name, content)
    return folder


def difference(found: Any, expected: Any, at: str = "it") -> str:
    """Where two results first differ, and how."""
    if type(found) is type(expected) and isinstance(found, dict | list | tuple):
        keys = list(found) if isinstance(found, dict) else list(range(len(found)))
        if keys == (list(expected) if isinstance(expected, dict) else list(range(len(expected)))):
            key = next(key for key in keys if found[key] != expected[key])
            return difference(found[key], expected[key], f"{at}[{key!r}]")
    return f"{at} is {found!r}, not {expected!r}"[:500]


def campaign(name: str, kills: int, seed: int, folder: pathlib.Path, console: Console) -> list[str]:
    """Kills one kind of run so often; what was wrong."""
    work, rng, faults = WORKS[name], random.Random(f"{name} {seed}"), list[str]()
    write_text(folder)
    place, since = fresh(folder / "run"), time.monotonic()
    process = begun(work, place)
    changes = watched(process, place, (None, None))
    seconds = time.monotonic() - since
    expected = work.found(place)
    console.print(f"{name}: undisturbed {seconds:.0f} s, {changes} changes of its folder")
    when, place = moments(rng, seconds, changes), fresh(place)
    done, whole, finished = 0, 0, False
    with console.status(name) as status:
        while done < kills or not finished:
            process = begun(work, place)
            if done < kills:
                watched(process, place, next(when))
            _, said = process.communicate()
            killed = process.returncode == -signal.SIGKILL
            done += killed
            try:
                if process.returncode and not killed:
                    raise ValueError(f"it ended with {process.returncode}: {said.decode()[-300:]}")
                finished = work.left(place) if killed else True
                if finished and (found := work.found(place)) != expected:
                    raise ValueError(difference(found, expected))
                mine = {
                    file: (place / file).read_text() for file in MINE if (place / file).is_file()
                }
                if mine != MINE:
                    raise ValueError(f"of the user's files {mine} are left")
            except (ValueError, OSError) as error:
                faults.append(f"{name}, after kill {done}: {error}")
                finished = True
            if finished:
                whole += 1
                place = fresh(place)
            status.update(f"{name}: {done} of {kills} kills, {whole} runs to their end")
    console.print(f"{name}: {done} of {kills} kills, {whole} runs to their end")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills runs at random moments; compares the rest.")
    for name, count in (("sweep", 20), ("conversion", 10), ("training", 5)):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"kills ({count})")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    options = parser.parse_args()
    console, faults = Console(stderr=True), list[str]()
    table = Table("run", "kills", "faults")
    for name in WORKS:
        if kills := getattr(options, name):
            with tempfile.TemporaryDirectory() as folder:
                found = campaign(name, kills, options.seed, pathlib.Path(folder), console)
            table.add_row(name, str(kills), str(len(found)))
            faults += found
    print(*faults, sep="\n")
    Console().print(table)
    parser.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
