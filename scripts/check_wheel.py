"""Installs the wheel as a user would, and runs every command of its help from another folder.

    python scripts/check_wheel.py

The environment is new, the folder empty; there is no compiler on the path, no network and no home
folder (the last two where the system lets `unshare` take them away). A command works, or says in a
sentence what it needs. Exit code 1 if one does neither, or if a command of the help is not in the
list below. It takes a quarter of an hour, and needs a package index or pip's cache to begin with.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
MINUTES = 10  # That a command may take.
# A user without a name has no home folder either; a network of one's own has nobody in it.
ALONE = [shutil.which("unshare") or "", "--user", "--map-user=12345", "--net"]
TEXT = "translate English to German: This package contains a small editor."
# Less of everything: what is measured does not matter here.
SHORT = ["--limit=1", *("--gin=RowConfig." + field for field in ("rounds = 1", "max_length = 16"))]
SHORT += ["--gin=RowConfig.alpha_tokens = 20"]
KEPT = "results/run/rows/table2/debian_ende_t0/examples.jsonl"  # Which `run` leaves.


class Case(NamedTuple):
    """A command, what its output must match, and its exit code: 2 is a sentence of its needs."""

    command: list[str]
    says: str
    code: int = 0
    given: str = ""  # On standard input.


CASES = [
    Case(["generate", TEXT], "Editor"),
    Case(["generate", "--json", "--temperature=1", "--draft=copy"], '"tokens"', given=TEXT),
    Case(["generate", "--gamma=auto", "--task=debian_ende", "A small editor."], "Editor"),
    Case(["generate", "--target=google/t5-v1_1-small", TEXT], "pip install huggingface_hub", 2),
    Case(["demo", "--limit=1"], r"Written: results/demo/records\.jsonl"),
    Case(["run", *SHORT], r"Written: results/run/records\.jsonl"),
    Case(
        ["run", "--gin_file=configs/runs/table3.gin:debian_lm_copy_t0", *SHORT, "--output_dir=lm"],
        r"Written: lm/records\.jsonl",
    ),
    Case(["run", "--gin_file=configs/runs/table2/ende_small_t0.gin"], "--checkpoints=DIR", 2),
    Case(["run", "--gin_file=configs/runs/none.gin"], "There is no configuration", 2),
    Case(["table", "1"], "Theorem 3.11"),
    Case(["table", "2", "--checkpoints=demo", *SHORT], r"Written: results/table2/records\.jsonl"),
    *(Case(["table", table], "--checkpoints=DIR", 2) for table in "2345"),
    Case(["table", "9"], "the tables are 1, 2, 3, 5", 2),
    Case(["tune", *SHORT], "Best: γ = |will not pay"),
    Case(["verify", "--limit=1", "--samples=16"], "EXACT: 1 of 1 greedy outputs are equal"),
    Case(
        ["verify", "--gin_file=configs/runs/table2.gin:debian_ende_t1", "--limit=1"],
        "EXACT",
    ),
    *(
        Case(["figure", str(number), *SHORT], rf"Written: results/figures/figure_{number}\.")
        for number in range(1, 6)
    ),
    Case(["count", KEPT, "--columns=source,autoregressive", "--output=a.npz"], r"Written: a\.npz"),
    Case(["generate", "--draft=a.npz", TEXT], "Editor"),
    Case(["bench", "--widths", "1", "2"], r"Written: results/bench/"),
    Case(["plan"], "fits on a TPU v4"),
    Case(["plan", "--gin_file=configs/runs/table2/ende_small_t0.gin"], "fits on a TPU v4"),
    Case(["compile", "--target=t5_base", "--draft=t5_small"], "pip install libtpu", 2),
    Case(["report", "results/table2", "lm", "--output=all.html"], r"Written: all\.html"),
    Case(["inspect", "debian_target"], "32,2"),
    Case(["convert", "debian_target", "hf", "--to=huggingface"], "Written: hf"),
    Case(["convert", "debian_target", "t5x", "--to=t5x"], "Written: t5x"),
    Case(["convert", "debian_draft", "no", "--to=huggingface"], "no T5 without an encoder", 2),
    Case(["inspect", "hf"], "debian.model|spiece.model"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=pathlib.Path, help="instead of building it")
    parser.add_argument("commands", nargs="*", help="only these, in the order of the list (all)")
    options = parser.parse_args()
    wheel, cases = options.wheel, CASES
    if options.commands:
        cases = [case for case in CASES if case.command[0] in options.commands]
    alone = ALONE if ALONE[0] and _run([*ALONE, sys.executable, "-c", ""]).returncode == 0 else []
    if not alone:
        print(
            "Network and home folder cannot be taken away here; there is no compiler all the same."
        )
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as temporary:
        place = pathlib.Path(temporary)
        wheel = wheel or build(place)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        programs = install(wheel.resolve(), place)
        folder = place / "elsewhere"
        folder.mkdir()
        # Programs are compiled once for all commands; without this they would be for each.
        env = {"PATH": str(programs), "JAX_COMPILATION_CACHE_DIR": str(place / "compiled")}
        env |= {} if alone else {"HOME": os.devnull}
        program = [*alone, str(programs / "speculative")]
        listed = _run([*program, "--help"], cwd=folder, env=env).stdout
        listed = set(re.findall(r"^    (\w+) ", listed, re.MULTILINE))
        missing = sorted(listed - {case.command[0] for case in CASES})
        for command in missing:
            print(f"FAILED          there is no case of {command} in {__file__}")
        failed = [case for case in cases if not passes(case, program, folder, env)]
    print(f"{len(cases) - len(failed)} of {len(cases)} did what was asked of them.")
    return int(bool(failed or missing))


def build(place: pathlib.Path) -> pathlib.Path:
    """The wheel of what git knows of the checkout, as it is now."""
    files = _run(["git", "ls-files", "-z"], cwd=ROOT, check=True).stdout.split("\0")
    for name in filter(None, files):
        copy = place / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "-w", str(place), str(place / "source")], check=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def install(wheel: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """The folder of programs of a new environment that has the wheel."""
    _run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    programs = place / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "install", "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return programs


def passes(case: Case, program: list[str], folder: pathlib.Path, env: dict[str, str]) -> bool:
    """Runs a command and prints a line about it, and what it said where that is wrong."""
    began = time.monotonic()
    try:
        done = _run([*program, *case.command], cwd=folder, env=env, input=case.given)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, err = None, "", f"It took more than {MINUTES} minutes."
    said = " ".join(out.split()) if not case.code else err.strip().rpartition("\n")[2]
    sentence = case.code == 0 or said.startswith("error: ")
    good = code == case.code and sentence and re.search(case.says, said) is not None
    good = good and "Traceback" not in out + err
    status = "FAILED" if not good else "says so" if case.code else "works"
    seconds = time.monotonic() - began
    print(f"{status:<8} {seconds:5.0f} s speculative {' '.join(case.command)}", flush=True)
    if not good:
        print(
            f"exit code {code}, expected {case.code} and {case.says!r}\n{out[-2000:]}{err[-2000:]}"
        )
    return good


def _run(command: list[str], check: bool = False, **options: Any) -> subprocess.CompletedProcess:
    """Runs to the end, within `MINUTES`; what it prints is kept, and told if it fails a check."""
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=60 * MINUTES, **options
    )
    if check and done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":
    sys.exit(main())
