"""Runs the commands and the Python of README.md and docs/.

    python scripts/run_docs.py                    (README.md docs/*.md, unless files are named)

Commands stand in blocks, fenced or indented, and between backquotes. Those that need something
that is not here are left out, but their options are looked at. What is measured is measured on one
short text. The Python of a page is run as one program. Exit code 1 if anything fails. It takes
half an hour.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]
PROGRAMS = "speculative|python|make|pip|sh"  # A line is a command if it begins with one of these.
TEXT = "translate English to German: This package contains a small editor.\n"  # Standard input.

# As a page about meshes says; other commands use the first device.
FOUR = "--xla_force_host_platform_device_count=4"

# What a command is run as, by a pattern.
MEANT = {
    r"^\.venv(-tpu)?/bin/": "",
    r"^make demo": "speculative demo",
    r"\bDIR…": "results/demo",
}

# Patterns of commands that are not run.
ABSENT = [
    *(
        "gs://",
        "google/|hf://",
        "^(make|pip|sh) ",
        "speculative compile",
        "--distributed",
    ),  # Network, machines.
    "-m benchmarks|random",  # Much memory, or many minutes.
    "…|[.][.][.]",  # The rest of the command.
    r"\b(DIR|FILE|TARGET|DRAFT|FOLDER)\b|[a-z]\.(txt|tsv)",  # Files and folders of the user's own.
    r"samples\.jsonl|my_tasks|table ?9|data/tokenized|work/",  # What other steps make.
]

# Options with which a command takes less time, by a pattern. Results have a folder for each
# command, for where there are some already a command goes on with them.
BINDINGS = ("rounds = 1", "max_length = 16", "alpha_tokens = 20")
LESS = {
    "run|table [2-5]|tune|verify|demo|evaluate": ["--limit=1"],
    "run|table [2-5]|tune": [f"--gin='RowConfig.{binding}'" for binding in BINDINGS],
    "verify": ["--samples=16"],
    "bench": ["--widths", "1", "2"],
    "run|table [2-5]|bench|evaluate": ["--output_dir=results/{number}"],
}


def commands(text: str) -> Iterator[str]:
    """The commands of a page as they are run, in order; after a backslash a line goes on."""
    text = re.sub(r"^```(?!sh)\w+\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = r"^```sh\n(.*?)^```$|((?:^(?: {4}.*)?\n)+)|`([^`]+)`"
    for block, indented, span in re.findall(blocks, text, re.MULTILINE | re.DOTALL):
        lines = (block or indented).replace("\\\n", " ").split("\n") if not span else [span]
        for line in lines:
            command = re.sub(r"\s+#.*$|\s{4,}\(.*\)$", "", " ".join(line.split()))
            if re.match(rf"(?:\.venv/bin/)?(?:{PROGRAMS}) \S", command):
                for pattern, meant in MEANT.items():
                    command = re.sub(pattern, meant, command)
                yield command


def wrong(command: str) -> str:
    """What is wrong with the options of a command of the package; empty if nothing is."""
    from speculative import cli

    name, *given = shlex.split(command)
    if name == "speculative":
        try:
            cli._parser().parse_args([word for word in given if word not in ("…", "...")])
        except (SystemExit, ValueError) as error:
            return str(error)
    return ""


def failure(command: str, number: int, folder: pathlib.Path) -> str:
    """Runs a command in a folder; what it said if it failed, else nothing."""
    kinds = [kind for kind in LESS if re.match(f"speculative ({kind})", command)]
    options = " ".join(option for kind in kinds for option in LESS[kind])
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", "20m", "bash", "-c", f"{command} {options.format(number=number)}"],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "XLA_FLAGS": FOUR},
        input=TEXT,
        capture_output=True,
        encoding="utf-8",
    )
    said = done.stdout + done.stderr
    good = done.returncode == 0 and "Traceback" not in said
    return "" if good else f"exit code {done.returncode}\n{said[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="(README.md and docs/*.md)")
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in parser.parse_args().pages}
    found = dict.fromkeys(command for text in pages.values() for command in commands(text))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="run-docs-") as temporary:
        folder = pathlib.Path(temporary)
        for page, text in pages.items():
            program = folder / f"{page.replace('/', '_')}.py"
            if blocks := re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
                program.write_text("\n".join(blocks), encoding="utf-8")
                found[f"python {program.name}"] = None
        for number, command in enumerate(found):
            absent = any(re.search(pattern, command) for pattern in ABSENT)
            said = wrong(command) or ("" if absent else failure(command, number, folder))
            status = "FAILED" if said else "left out" if absent else "works"
            print(f"{status:<8} {command}", *filter(None, [said]), sep="\n", flush=True)
            failed += bool(said)
    print(f"{failed} of {len(found)} failed.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
