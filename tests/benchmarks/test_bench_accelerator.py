"""What the script for one accelerator runs, with a Python that only logs its arguments."""

import os
import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_accelerator.sh"
PYTHON = """#!/bin/sh
case "$2" in
  *default_backend*) echo "$PLATFORM" ;;
  *device_kind*) echo A_device ;;
  *) echo "${XLA_FLAGS:-no flags} | $*" >> "$LOG" ;;
esac
"""


def run(
    folder: pathlib.Path, platform: str, *more: str, python: str = PYTHON, **environment: str
) -> int:
    """The exit code of the script, whose Python writes to `log` in the folder."""
    file = folder / "python"
    file.write_text(python)
    file.chmod(0o755)
    given = {"PYTHON": str(file), "LOG": str(folder / "log"), "PLATFORM": platform}
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    found = subprocess.run(
        ["sh", str(SCRIPT), *more], env=kept | given | environment, capture_output=True
    )
    return found.returncode


def ran(folder: pathlib.Path, *given: str, **environment: str) -> list[str]:
    """The lines that it has written."""
    assert run(folder, *given, **environment) == 0
    return (folder / "log").read_text().splitlines()


def test_xxl_with_every_draft_and_the_twelve_rows(tmp_path: pathlib.Path) -> None:
    *benches, table, figure = ran(tmp_path, "tpu", "--limit=9")
    assert len(benches) == 3
    for line, draft in zip(benches, ("small", "base", "large"), strict=True):
        assert line.startswith("no flags | -m speculative.cli bench --target=t5_1_1_xxl")
        assert f"--draft=t5_1_1_{draft} --weights=random --dtype=bfloat16" in line
        assert line.endswith(f"--output_dir=results/A_device/bench_t5_1_1_{draft}")
    assert "table 2 --weights=random --simulated_alpha=paper --dtype=bfloat16" in table
    assert "--gin RowConfig.target = 't5_1_1_xxl'" in table
    assert table.endswith("--output_dir=results/A_device/table2 --limit=9")
    assert "figure 4 --records=results/A_device/table2/records.jsonl" in figure


def test_a_gpu_is_measured_with_command_buffers_too(tmp_path: pathlib.Path) -> None:
    lines = ran(tmp_path, "gpu", DRAFTS="one two", OUT="elsewhere")
    with_flags = [line for line in lines if not line.startswith("no flags")]
    (line,) = with_flags
    assert line.startswith(" --xla_gpu_enable_command_buffer=FUSION,")
    assert "WHILE | " in line
    assert line.endswith("--output_dir=elsewhere/bench_one_command_buffers")


@pytest.mark.parametrize("failing", ["bench", "table"])
def test_a_failure_ends_it(tmp_path: pathlib.Path, failing: str) -> None:
    python = PYTHON.replace("*) echo", f'*) case "$*" in *{failing}*) exit 3;; esac; echo')
    assert run(tmp_path, "cpu", python=python) == 3
