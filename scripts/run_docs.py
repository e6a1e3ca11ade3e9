"""Runs the commands and the Python code in README.md and docs/.

    python scripts/run_docs.py                    (README.md docs/*.md, unless files are named)

Commands are in fenced or indented blocks, and between backquotes. Those that need something not
available here are skipped, but their options are checked. Measurements use one short text. The
Python code of a page is run as one program. The exit code is 1 if anything fails. This takes half
an hour.
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

# docs/mesh.md sets this; other commands use the first device.
FOUR = "--xla_force_host_platform_device_count=4"

# Replacements in a command before it is run, by pattern.
MEANT = {
    r"^\.venv/bin/": "",
    r"^python scripts/": f"python {ROOT}/scripts/",
    r"^make demo": "speculative demo",
    "table 2 --workers": "table 2 --checkpoints=demo --workers",
    r"\bDIR…": "results/demo",
}

# Patterns of commands that are not run, by reason.
ABSENT = [
    *(
        "gs://",
        "google/|hf://",
        "^(make|pip|sh) ",
        "speculative compile",
        "--distributed",
        "export_tokenized|--checkpoints=v1_0",
    ),  # They need a network or machines.
    "-m benchmarks|random",  # They need much memory or many minutes.
    "scripts/(api|pictures)",  # They write into docs/.
    "…|[.][.][.]",  # The command is incomplete.
    r"\b(DIR|FILE|TARGET|DRAFT|FOLDER)\b|[a-z]\.(txt|tsv)|question\.jsonl",  # Files of the user.
    r"(samples|chats)\.jsonl|my_tasks|table ?9|data/tokenized|work/",  # Outputs of other steps.
]

# Models that a command may name where `make test-real` put them, or a draft beside them.
REAL = pathlib.Path.home() / ".cache/speculative/real"
MODELS = ("smollm2", "smollm2_draft")

# Options that shorten a command, by pattern. Each command has a separate folder for results,
# because it would resume existing ones.
BINDINGS = ("rounds = 1", "max_length = 16", "alpha_tokens = 20")
LESS = {
    "run|table [2-5]|tune|verify|demo|evaluate": ["--limit=1"],
    "run|table [2-5]|tune": [f"--gin='RowConfig.{binding}'" for binding in BINDINGS],
    "verify": ["--samples=16"],
    "bench": ["--widths", "1", "2"],
    "run|table [2-5]|bench|evaluate": ["--output_dir=results/{number}"],
}


def commands(text: str) -> Iterator[str]:
    """The commands of a page as they are run, in order; a backslash continues a line."""
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
    """The error in the options of a command of the package; empty if there is none."""
    from speculative import cli

    name, *words = shlex.split(command)
    if name == "speculative":
        try:
            cli._parser().parse_args([word for word in words if word not in ("…", "...")])
        except (SystemExit, ValueError) as error:
            return str(error)
    return ""


def failure(command: str, number: int, folder: pathlib.Path) -> str:
    """Runs a command in a folder; returns its output if it failed, else nothing."""
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
    output = done.stdout + done.stderr
    good = done.returncode == 0 and "Traceback" not in output
    return "" if good else f"exit code {done.returncode}\n{output[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="(README.md and docs/*.md)")
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in parser.parse_args().pages}
    tested = dict.fromkeys(command for text in pages.values() for command in commands(text))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="run-docs-") as temporary:
        folder = pathlib.Path(temporary)
        present = [model for model in MODELS if (REAL / model).is_dir()]
        missing = [rf"\b{model}\b" for model in MODELS if model not in present]
        for model in present:
            (folder / model).symlink_to(REAL / model)
        for page, text in pages.items():
            program = folder / f"{page.replace('/', '_')}.py"
            if blocks := re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
                program.write_text("\n".join(blocks), encoding="utf-8")
                tested[f"python {program.name}"] = None
        for number, command in enumerate(tested):
            absent = any(re.search(pattern, command) for pattern in ABSENT + missing)
            problem = wrong(command) or ("" if absent else failure(command, number, folder))
            status = "FAILED" if problem else "left out" if absent else "works"
            print(f"{status:<8} {command}", *filter(None, [problem]), sep="\n", flush=True)
            failed += bool(problem)
    print(f"{failed} of {len(tested)} failed.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
