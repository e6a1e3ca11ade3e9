"""The launcher of TPU VMs: what it would run, and what that does where gcloud is a stand-in."""

import os
import pathlib
import shlex
import shutil
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tpu" / "vm.sh"
SETTINGS = {"PROJECT": "my project", "ZONE": "us-central2-b", "NAME": "my 'tpu'"}
VM = ["--project=my project", "--zone=us-central2-b"]
TPU = ["gcloud", "compute", "tpus", "tpu-vm"]

GCLOUD = """#!/usr/bin/env bash
# Stands in for a VM: its home is a folder, ssh is bash, scp is cp.
cd "$VM_HOME"
for argument; do
  case $argument in
    --command=*) HOME=$VM_HOME exec bash -c "${argument#--command=}" ;;
  esac
done
[[ $4 == scp ]] && exec cp "$5" "${6#*:}"
"""
SPECULATIVE = """#!/usr/bin/env bash
printf '<%s>' "$@"
printf '\\n'
until [[ -e go ]]; do sleep 0.02; done
exit 3
"""


Changes = dict[str, str | None]


def vm(
    *arguments: str, changes: Changes | None = None, script: pathlib.Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    """Runs the script; a setting that is None is left out."""
    kept = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    settings = {
        key: value for key, value in (SETTINGS | (changes or {})).items() if value is not None
    }
    return subprocess.run(
        [str(script), *arguments], env=kept | settings, capture_output=True, text=True, check=False
    )


def dry(*arguments: str, **changes: str) -> list[list[str]]:
    """The commands that a dry run prints, as a shell would read them."""
    done = vm("--dry_run", *arguments, changes=dict(changes))
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines()]


def ssh(command: str) -> list[str]:
    return [*TPU, "ssh", "my 'tpu'", f"--command={command}", *VM]


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The home folder of a VM that gcloud reaches, where python3 does nothing."""
    made = tmp_path / "home of the vm"
    programs = tmp_path / "programs"
    for folder in (made, programs):
        folder.mkdir()
    for name, text in (("gcloud", GCLOUD), ("python3", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("VM_HOME", str(made))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return made


def test_create() -> None:
    assert dry("create") == [
        [*TPU, "create", "my 'tpu'", "--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base"]
        + VM
    ]
    assert dry("create", ACCELERATOR="v5p-8", RUNTIME="v2-alpha-tpuv5") == [
        [*TPU, "create", "my 'tpu'", "--accelerator-type=v5p-8", "--version=v2-alpha-tpuv5", *VM]
    ]


def test_install() -> None:
    bundle, copy, remove, fetch, install = dry("install", TMPDIR="/some where")
    file = "/some where/speculative-my 'tpu'.bundle"
    assert bundle == ["git", "-C", str(ROOT), "bundle", "create", "--quiet", file, "HEAD"]
    assert copy == [*TPU, "scp", file, "my 'tpu':speculative.bundle", *VM]
    assert remove == ["rm", file]
    assert "git fetch --quiet ../speculative.bundle HEAD" in fetch[-3]
    (command,) = [word for word in install if word.startswith("--command=")]
    assert shlex.split(command)[-1] == "--editable=.[tpu,tasks]"


def test_ssh() -> None:
    assert dry("ssh") == [[*TPU, "ssh", "my 'tpu'", *VM]]
    (found,) = dry("ssh", "ls", "-l", "two words", "$HOME")
    assert found == ssh(found[-3].removeprefix("--command="))
    words = shlex.split(found[-3].removeprefix("--command="))
    assert words == ["ls", "-l", "two words", "$HOME"]


def test_run() -> None:
    (found,) = dry("run", "3", "--checkpoints=gs://bucket/a folder", "--limit=5")
    command = found[-3].removeprefix("--command=")
    assert found == ssh(command)
    words = shlex.split(command)
    place, job = words.index("nohup"), words[words.index("-c") + 1]
    assert words[:place] == [
        *("cd", "speculative", "&&", "mkdir", "-p", "results/table3", "||", "exit;")
    ]
    assert words[-4:] == [">>results/table3/log.txt", "2>&1", "</dev/null", "&"]
    assert shlex.split(job) == [
        *(".venv/bin/speculative", "table", "3", "--output_dir=results/table3"),
        *("--checkpoints=gs://bucket/a folder", "--limit=5"),
        *(";", "echo", "exit code $?"),
    ]


def test_fetch_and_delete() -> None:
    assert dry("fetch", "2") == [
        ["mkdir", "-p", str(ROOT / "results")],
        [*TPU, "scp", "--recurse", "my 'tpu':speculative/results/table2", str(ROOT / "results")]
        + VM,
    ]
    assert dry("delete") == [[*TPU, "delete", "my 'tpu'", *VM]]


def test_a_dry_run_runs_nothing(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for verb in (["create"], ["install"], ["ssh", "touch", "x"], ["run", "2"], ["delete"]):
        dry(*verb)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_outlives_its_connection_and_logs_its_end(home: pathlib.Path) -> None:
    program = home / "speculative" / ".venv" / "bin" / "speculative"
    program.parent.mkdir(parents=True)
    program.write_text(SPECULATIVE)
    program.chmod(0o755)
    log = home / "speculative" / "results" / "table2" / "log.txt"
    # `vm` reads its pipes to their end, which would not come if the job had kept them.
    assert vm("run", "2", "--data_file=a 'b' $c.tsv").returncode == 0
    (home / "speculative" / "go").touch()
    deadline = time.monotonic() + 60
    while not (log.exists() and "exit code" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    said = "<table><2><--output_dir=results/table2><--data_file=a 'b' $c.tsv>"
    assert log.read_text().splitlines() == [said, "exit code 3"]


def test_a_run_without_an_installation_fails(home: pathlib.Path) -> None:
    done = vm("run", "2")
    assert done.returncode == 1
    assert "speculative" in done.stderr


def test_the_installed_commit_is_the_one_that_is_checked_out(
    home: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    checkout, there = tmp_path / "check out", home / "speculative"
    script = checkout / "scripts" / "tpu" / "vm.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    log = there / "results" / "table2" / "log.txt"
    git(checkout, "init", "--quiet")
    for text in ("first", "second"):  # The second time, what was measured must stay.
        (checkout / "file").write_text(text)
        git(checkout, "add", "file")
        git(checkout, "commit", "--quiet", "--message", text)
        done = vm("install", script=script)
        assert (done.returncode, done.stderr) == (0, "")
        assert git(there, "describe", "--always") == git(checkout, "describe", "--always")
        assert (there / "file").read_text() == text
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(log.read_text() + text if log.exists() else text)
    assert log.read_text() == "firstsecond"
    assert not list(tmp_path.glob("*.bundle"))


def git(folder: pathlib.Path, *arguments: str) -> str:
    """What git says, in a folder and as somebody."""
    somebody = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *somebody, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (["create"], {"PROJECT": None}, "PROJECT not set; export PROJECT, ZONE and NAME"),
        (["delete"], {"ZONE": "", "NAME": None}, "ZONE, NAME not set"),
        ([], {}, "'' is none of create, install, ssh, run, fetch and delete"),
        (["destroy"], {}, "'destroy' is none of"),
        (["run"], {}, "'' is no table to run; give 2, 3, 4 or 5"),
        (["fetch", "1"], {}, "'1' is no table to fetch"),
        (["create"], {"PATH": "/usr/bin/nowhere:/bin/nowhere"}, "gcloud is not installed"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], changes: Changes, said: str, home: pathlib.Path
) -> None:
    if "PATH" in changes:
        # What the script itself needs, and nothing else.
        programs = home / "few"
        programs.mkdir()
        for name in ("bash", "env", "dirname"):
            (programs / name).symlink_to(str(shutil.which(name)))
        changes = {"PATH": str(programs)}
    done = vm(*arguments, changes=changes)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_help_is_the_header() -> None:
    done = vm("--help", changes={"PROJECT": None})
    assert done.returncode == 0
    assert "scripts/tpu/vm.sh create" in done.stdout
    assert "set -euo" not in done.stdout


def test_bash_reads_it() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
