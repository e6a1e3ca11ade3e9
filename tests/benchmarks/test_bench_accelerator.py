"""What the script for one accelerator runs, with a Python that only logs its arguments."""

import os
import pathlib
import subprocess

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


def test_the_most_telling_comes_first(tmp_path: pathlib.Path) -> None:
    lines = ran(tmp_path, "cpu", OUT=f"{tmp_path}/out")
    first, ende, peer, int8, tree, chat, chat_peer, coupled, cnndm = lines
    # Torch would compute on a TPU's host.
    again = tmp_path / "again"
    again.mkdir()
    own = [line.replace("/again/", "/") for line in ran(again, "tpu", OUT=f"{again}/out")]
    assert own == [line for line in lines if "time_transformers" not in line]
    assert first.startswith("no flags | -m speculative.cli bench --target=t5_1_1_xxl")
    assert "--draft=t5_1_1_small --weights=random --dtype=bfloat16" in first
    assert f"--output_dir={tmp_path}/out/bench_t5_1_1_small --widths 1 8 16 32 64" in first
    rows = {ende: "ende_small_t0", tree: "ende_small_t0", int8: "ende_small_t0"}
    for line, row in (rows | {coupled: "ende_small_t1", cnndm: "cnndm_small_t0"}).items():
        assert f"run --gin_file=configs/runs/table2/{row}.gin --target=t5_1_1_xxl" in line
        assert "--draft=t5_1_1_small --weights=random --simulated_alpha=paper" in line
    assert "--tree=15" in tree and "--quantize=int8" in int8
    assert "--verification=coupled --tree=15" in coupled
    assert "bench --target=smollm2_135m --draft=copy" in chat and "--widths 1 8 64" in chat
    assert "-m benchmarks.time_transformers --target=smollm2_135m --draft=none" in chat_peer
    assert "-m benchmarks.time_transformers --target=t5_1_1_xxl --draft=t5_1_1_small" in peer


def test_a_gpu_is_measured_with_all_graphs_and_with_none(tmp_path: pathlib.Path) -> None:
    lines = ran(tmp_path, "gpu", DRAFT="one", OUT=f"{tmp_path}/out")
    all_, none = (line for line in lines if not line.startswith("no flags"))
    assert all_.startswith(" --xla_gpu_enable_command_buffer=FUSION,")
    assert "WHILE | " in all_ and "out/loops_as_graphs" in all_
    assert none.startswith(" --xla_gpu_enable_command_buffer= | ") and "out/no_graphs" in none


def test_a_failure_is_told_and_ends_nothing_else(tmp_path: pathlib.Path) -> None:
    python = PYTHON.replace("*) echo", '*) case "$*" in *ende_small*) exit 3;; esac; echo')
    assert run(tmp_path, "cpu", python=python, OUT=f"{tmp_path}/out") == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 5


def test_nothing_begins_within_the_last_seconds(tmp_path: pathlib.Path) -> None:
    assert run(tmp_path, "gpu", OUT=f"{tmp_path}/out", SECONDS_IN_ALL="19") == 1
    assert not (tmp_path / "log").exists()
