"""Installs the wheel as a user would, and runs commands from another folder.

    python scripts/check_wheel.py

The environment is new, the folder empty; there is no compiler on the path and no home folder. The
exit code is 1 if a command does not behave as listed below. This takes ten minutes, and needs a
package index or pip's cache.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
TEXT = "'translate English to German: This package contains a small editor.'"
# Measurements are short, because their values do not matter here.
BINDINGS = ("rounds = 1", "max_length = 16", "alpha_tokens = 20")
SHORT = " ".join(["--limit=1", *(f"--gin='RowConfig.{binding}'" for binding in BINDINGS)])

# Commands, which depend on packaged files or on a dependency, and a pattern of each one's output. A
# command that needs a package that is not installed ends in an error, with exit code 2.
CASES = {
    f"generate {TEXT}": "Editor",
    f"generate --json --draft=copy {TEXT}": '"tokens"',
    f"generate --target=google/t5-v1_1-small {TEXT}": "error: .*the hub did not give",
    "demo --limit=1": r"Written: results/demo/records\.jsonl",
    f"run --gin_file=configs/runs/table3.gin:debian_lm_copy_t0 {SHORT}": "Written: ",
    "table 1": "Theorem 3.11",
    "verify --limit=1 --samples=16": "PASSED: ",
    "report results/demo": r"Written: results/demo/report\.html",
    "evaluate --task=debian_ende --limit=1": "Written: ",
    "bench --widths 1 2": "Written: ",
    "compile --target=t5_base --draft=t5_small": "error: .*pip install libtpu",
    "convert debian_target hf --to=huggingface": "Written: hf",
    "inspect hf": r"debian\.model|spiece\.model",
}


def build(place: pathlib.Path) -> pathlib.Path:
    """Builds the wheel from the checkout's files that git tracks, as they are now."""
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        copy = place / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.check_call([*pip, "wheel", "--no-deps", "-w", str(place), str(place / "source")])
    (wheel,) = place.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    return wheel


def install(wheel: pathlib.Path, environment: pathlib.Path) -> pathlib.Path:
    """Installs the wheel in a new environment and returns its folder of programs."""
    subprocess.check_call([sys.executable, "-m", "venv", str(environment)])
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--quiet", "install"]
    subprocess.check_call([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)])
    return environment / "bin"


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as temporary:
        place = pathlib.Path(temporary)
        programs = install(build(place), place / "venv")
        (place / "elsewhere").mkdir()
        # Without this cache, programs would be compiled again for each command.
        env = {"PATH": str(programs), "JAX_COMPILATION_CACHE_DIR": str(place / "compiled")}
        for command, says in CASES.items():
            done = subprocess.run(
                [str(programs / "speculative"), *shlex.split(command)],
                cwd=place / "elsewhere",
                env=env | {"HOME": os.devnull},
                capture_output=True,
                encoding="utf-8",
            )
            output = done.stdout + done.stderr
            code = 2 if says.startswith("error: ") else 0
            match = re.search(says, " ".join(output.split()))
            good = done.returncode == code and match and "Traceback" not in output
            print(f"{'works' if good else 'FAILED':<6} speculative {command}", flush=True)
            if not good:
                print(f"exit code {done.returncode}, not {code} with {says!r}\n{output[-3000:]}")
                failed += 1
    print(f"{failed} of {len(CASES)} failed.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
