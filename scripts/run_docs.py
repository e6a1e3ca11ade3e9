"""Runs the commands and the Python of README.md and docs/, in a copy of the checkout.

    python scripts/run_docs.py                    (README.md docs/*.md, unless files are named)

Commands stand in blocks, fenced or indented, and between backquotes. Each has to end well and to
print what `SAYS` asks of its kind. Tables are measured on one short text a row, or as printed with
--whole. What needs something that is not here is left out, and the reason told; its options are
looked at all the same. The Python of a page is run as one program. Exit code 1 if anything fails.
It takes half an hour.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]
PROGRAMS = "speculative|python|make|pip|sh"  # A line is a command if it begins with one of these.
MINUTES = 20  # That a command may take.

# What a command needs that is not here, by a pattern of it. The first that is found is told.
ABSENT = {
    "gs://": "a bucket",
    "google/|hf://": "the network",
    "…|[.][.][.]": "the rest of it, for it is cut short",
    "^pip install": "packages to install (scripts/check_wheel.py installs)",
    r"^make (test|check|clean)|pytest": "nothing, but it is for those who change the code",
    "compare_peers|audit_peers": "the extra `peers`",
    "bench_accelerator": "an accelerator",
    "speculative compile": "the TPU's compiler (make test-tpu installs it)",
    "ablate_cpu|measure_|audit_faults|equal_texts": "a machine of its own, for many minutes",
    "fuzz_formats|kill_runs": "a machine of its own, for many minutes",
    r"--checkpoints[= ](?!demo)|\bDIR\b": "checkpoints of your own",
    "--weights[= ]random": "the memory of an accelerator, or hours",
    r"\b(TARGET|DRAFT|FOLDER)\b": "a pair and texts of your own",
    "--module my_tasks": "a module of your own (tests/test_own_rows.py has one)",
    r"scripts/train|work/": "texts that training leaves",
    "speculative audit": "samples of another program",
    r"prompts\.txt": "prompts of your own",
    "table ?9": "the table that the page would add",
}

# What stands for something in a command that is run, by a pattern.
MEANT = {r"^\.venv(-tpu)?/bin/": "", r"\bDIR…": "results/demo", r"\bfigure N\b": "figure 2"}

# What output matches, by a pattern of the command; each command of the package is here.
SAYS = {
    "make demo|speculative (demo|run|table [2-9])": r"Written: \S+records\.jsonl",
    "speculative table 1": "Theorem 3.11",
    "speculative generate": "[A-Za-z]{4}",
    "speculative tune": "Best: γ = |will not pay",
    "speculative verify": "EXACT: ",
    "speculative audit": "PASSED: ",
    "speculative (bench|figure|report|convert|count|distil)": "Written: ",
    "speculative plan": "fits on",
    "speculative compile": "Estimated by the TPU's compiler",
    "speculative inspect": "parameters",
    "speculative evaluate": r"Written: \S+texts\.jsonl and \S+scores\.json",
}

# Less of everything, where not --whole: options by a pattern of the command. Each has a folder of
# its own, for where there are results already a command goes on with them.
BINDINGS = ("rounds = 1", "max_length = 16", "alpha_tokens = 20")
LESS = {
    "speculative (run|table [2-5]|tune)": [
        "--limit=1",
        *(f"--gin=RowConfig.{b}" for b in BINDINGS),
    ],
    "speculative figure": [f"--gin=RowConfig.{b}" for b in BINDINGS],
    "speculative verify": ["--limit=1", "--samples=16"],
    "speculative bench": ["--widths", "1", "2"],
    "speculative (demo|evaluate)": ["--limit=1"],
    "speculative (run|table [2-9]|demo|bench|evaluate)": ["--output_dir=results/{}"],
}

TEXT = "translate English to German: This package contains a small editor.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="(README.md and docs/*.md)")
    parser.add_argument("--whole", action="store_true", help="measure whole tables")
    options = parser.parse_args()
    count = {"works": 0, "left out": 0, "FAILED": 0}
    done: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="run-docs-") as temporary:
        copy = pathlib.Path(temporary, "speculative")
        env = prepared(copy)
        for page in options.pages:
            text = (ROOT / page).read_text(encoding="utf-8")
            jobs = [(command, reason(command)) for command in commands(text)]
            if program := "\n".join(python(text)):
                (copy / "page.py").write_text(program, encoding="utf-8")
                jobs.append((f"python page.py  # {page}", None))
            for command, absent in jobs:
                if command in done:
                    continue
                done.add(command)
                status, said, seconds = outcome(command, absent, copy, env, options.whole)
                count[status] += 1
                after = f"  # needs {absent}" if absent else ""
                print(f"{status:<8} {seconds:4.0f} s {page}: {command}{after}", flush=True)
                if said:
                    print(said)
    print(", ".join(f"{status} {number}" for status, number in count.items()))
    return int(count["FAILED"] > 0)


def commands(text: str) -> Iterator[str]:
    """The commands of a page, in order; a line that ends in a backslash goes on."""
    text = re.sub(r"^```(?!sh)\w+\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = r"^```sh\n(.*?)^```$|((?:^(?: {4}.*)?\n)+)|`([^`]+)`"
    for block, indented, span in re.findall(blocks, text, re.MULTILINE | re.DOTALL):
        lines = (block or indented).replace("\\\n", " ").split("\n") if not span else [span]
        for line in lines:
            command = re.sub(r"\s+#.*$|\s{4,}\(.*\)$", "", " ".join(line.split()))
            if re.match(rf"(?:\.venv/bin/)?(?:{PROGRAMS}) \S", command):
                yield command


def python(text: str) -> list[str]:
    """The Python of a page, by blocks."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def reason(command: str) -> str | None:
    """What a command needs that is not here."""
    meant_ = meant(command)
    return next((need for pattern, need in ABSENT.items() if re.search(pattern, meant_)), None)


def meant(command: str) -> str:
    """A command with what its placeholders stand for."""
    for pattern, stands in MEANT.items():
        command = re.sub(pattern, stands, command)
    return command


def prepared(copy: pathlib.Path) -> dict[str, str]:
    """Makes the copy, whose .venv is this interpreter's, and gives the environment of commands."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    programs = copy / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in (("python", ""), ("speculative", "-m speculative.cli")):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        path.chmod(0o755)
    (programs.parent / "core.stamp").touch()  # `make demo` has nothing to install.
    env = {"JAX_COMPILATION_CACHE_DIR": str(copy.parent / "compiled")} | os.environ
    return env | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(copy)}


def outcome(
    command: str, absent: str | None, copy: pathlib.Path, env: dict[str, str], whole: bool
) -> tuple[str, str, float]:
    """Whether a command works, is left out or fails; what it said, if it fails; its seconds."""
    wanted = next((says for kind, says in SAYS.items() if re.match(kind, meant(command))), None)
    words = meant(command)
    if words.startswith("speculative ") and not wanted:
        return "FAILED", f"scripts/run_docs.py does not say what {command!r} prints.", 0
    if absent:
        said = wrong(words) if words.startswith("speculative ") else ""
        return ("FAILED" if said else "left out"), said, 0
    if not whole:
        more = [option for kind, less in LESS.items() if re.match(kind, words) for option in less]
        folder = hashlib.sha256(command.encode()).hexdigest()[:8]
        words = " ".join([words, *(shlex.quote(option.format(folder)) for option in more)])
    began = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", words],
            cwd=copy,
            env=env,
            input=TEXT,
            capture_output=True,
            encoding="utf-8",
            timeout=60 * MINUTES,
        )
        code, out, said = done.returncode, " ".join(done.stdout.split()), done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, out, said = None, "", f"It took more than {MINUTES} minutes."
    good = code == 0 and "Traceback" not in said and (not wanted or re.search(wanted, out))
    failure = f"exit code {code}, expected 0 and {wanted or 'nothing'!r}\n{said[-3000:]}"
    return ("works", "", time.monotonic() - began) if good else ("FAILED", failure, 0)


def wrong(command: str) -> str:
    """What is wrong with the options of a command of the package that is not run."""
    from speculative import cli

    given = [word for word in shlex.split(command)[1:] if word not in ("…", "...")]
    try:
        cli._parser().parse_args(given)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
