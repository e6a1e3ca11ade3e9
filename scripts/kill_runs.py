"""Kills runs (SIGKILL) at random moments, resumes them, and compares the files they leave.

    python scripts/kill_runs.py --sweep=20 --conversion=10 --training=5

A sweep, a conversion and a training run each run once undisturbed. Then they are killed, each time
right after a random number of changes to their folder, and restarted until the requested number of
kills is done. A killed run must leave a part of the undisturbed run's results: whole files, and
lines of JSON. A finished run must leave all of them, except for times. A file of the user's must
stay. The exit code is 1 if anything differs.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from speculative.training import data

ROOT = pathlib.Path(__file__).parents[1]
SPECULATIVE = [sys.executable, "-m", "speculative.cli"]
MINE = "out.unfinished/mine.txt"  # A careless program would use a folder of this name.
TIMED = re.compile(
    "(c|verify_cost|seconds|started_at|tokens_per_second|seconds_a_step|hours_left)$|ms_|speedup"
)

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
}

# The compared files of a run's folder.
RESULTS = {
    "sweep": ("out/records.jsonl", "out/rows/**/examples.jsonl"),
    "conversion": ("out/**/*",),
    "training": ("out/**/*", "work/log.jsonl"),
}


def command(kind: str, folder: pathlib.Path) -> list[str]:
    """Measures the bundled pair, converts the bundled target to T5X, or trains a tiny model."""
    out = folder / "out"
    if kind == "sweep":
        less = ["--limit=3", "--gin=RowConfig.rounds = 1", f"--output_dir={out}"]
        return [*SPECULATIVE, "table", "2", "--checkpoints=demo", *less]
    if kind == "conversion":
        return [*SPECULATIVE, "convert", "debian_target", str(out), "--to=t5x"]
    script = [sys.executable, "scripts/train.py", "--config=configs/training/target.gin"]
    folders = [f"--data_dir={folder.parent}", f"--work_dir={folder / 'work'}", f"--out_dir={out}"]
    return [*script, *folders, *(f"--gin={name}={value}" for name, value in TRAINING.items())]


def write_text(folder: pathlib.Path) -> None:
    """Writes the tokenized files that the training run reads."""
    rng = np.random.default_rng(0)
    for task in ("debian_ende", "debian_synopsis"):
        for split, count in (("train", 60), ("validation", 9), ("test", 5)):
            rows = [rng.integers(3, 8000, rng.integers(4, 20)) for _ in range(2 * count)]
            data.ragged(rows[:count], rows[count:]).save(folder / f"{task}_{split}.npz")


def listing(folder: pathlib.Path) -> dict[str, int]:
    """All files with their sizes; files may change meanwhile."""
    sizes = {}
    for place, _, files in os.walk(folder):
        for path in (os.path.join(place, file) for file in files):
            with contextlib.suppress(FileNotFoundError):
                sizes[path] = os.stat(path).st_size
    return sizes


def run(kind: str, folder: pathlib.Path, most: int | None = None) -> tuple[bool, int]:
    """Runs to the end, or until the folder has changed `most` times.

    Returns:
        Whether it ended by itself, and the number of changes.
    """
    if not folder.exists():
        (folder / MINE).parent.mkdir(parents=True)
        (folder / MINE).write_text("mine")
    process = subprocess.Popen(
        command(kind, folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    before, changes = listing(folder), 0
    while process.poll() is None:
        now = listing(folder)
        changes += now != before
        before = now
        if changes == most:
            process.kill()
        time.sleep(0.001)
    _, errors = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{kind} ended with {process.returncode}: {errors[-2000:].decode()}")
    return process.returncode == 0, changes


def results(kind: str, folder: pathlib.Path) -> collections.Counter[str]:
    """A run's results: lines of JSON without times, and the hashes of other files."""
    counts = collections.Counter[str]()
    paths = [path for pattern in (MINE, *RESULTS[kind]) for path in folder.glob(pattern)]
    for path in filter(pathlib.Path.is_file, paths):
        content = path.read_bytes()
        contents = [hashlib.sha256(content).hexdigest()]
        if path.suffix == ".jsonl":  # The last line of a killed run may be cut.
            lines = map(json.loads, content[: content.rfind(b"\n") + 1].splitlines())
            contents = [
                json.dumps({name: line[name] for name in line if not TIMED.match(name)})
                for line in lines
            ]
        counts.update(f"{path.relative_to(folder)}: {each}" for each in contents)
    return counts


def campaign(kind: str, kills: int, folder: pathlib.Path) -> int:
    """Kills one kind of run `kills` times; returns the number of faults."""
    write_text(folder)
    _, changes = run(kind, folder / "undisturbed")
    expected = results(kind, folder / "undisturbed")
    print(f"{kind}: undisturbed, {changes} changes to its folder", flush=True)
    faults, done, runs, finished = 0, 0, 0, False
    while done < kills or not finished:
        place = folder / f"run {runs}"
        ended, _ = run(kind, place, random.randint(1, changes) if done < kills else None)
        done += not ended
        # A conversion is complete when its destination is there, and is not repeated.
        ended = ended or (kind == "conversion" and (place / "out").exists())
        left = results(kind, place)
        more, missing = [*(left - expected)], [*(expected - left)] if ended else []
        if more or missing:
            faults += 1
            print(f"{kind}, after kill {done}: extra {more[:3]}, missing {missing[:3]}", flush=True)
        finished = ended or bool(more)
        runs += finished
    print(f"{kind}: {done} kills, {runs} finished runs, {faults} faults", flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills runs at random moments; compares results.")
    for kind, count in (("sweep", 20), ("conversion", 10), ("training", 5)):
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"number of kills ({count})")
    options = parser.parse_args()
    faults = 0
    for kind in RESULTS:
        if kills := getattr(options, kind):
            with tempfile.TemporaryDirectory() as folder:
                faults += campaign(kind, kills, pathlib.Path(folder))
    parser.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
