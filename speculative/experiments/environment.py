"""Where a measurement was made: the checkout and the machine, for people."""

import os
import pathlib
import platform
import subprocess

import jax

import speculative


def commit() -> str:
    """The checkout's commit, marked where its files differ from it, or else the version.

    Results do not count: what measures writes them over, before it asks.
    """
    root = pathlib.Path(speculative.__file__).parent.parent
    if (root / ".git").exists():
        try:
            name = _git(root, "describe", "--always")
            changed = _git(root, "status", "--porcelain", "-uno", "--", ".", ":!results")
            return name + "-dirty" * bool(changed)
        except (OSError, subprocess.CalledProcessError):
            pass
    return speculative.__version__


def _git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def gin() -> str:
    """What a row's examples share beside its configuration, as lines of a gin file."""
    here = {"commit": commit(), "device": device(), "jax_version": jax.__version__}
    return "".join(f"{name} = {value!r}\n" for name, value in here.items())


def device() -> str:
    """What computes, for people: an accelerator's kind, or the processor's name and cores."""
    kind = jax.devices()[0]
    if kind.platform != "cpu":
        return kind.device_kind
    name = platform.processor() or platform.machine()
    information = pathlib.Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {cores()} cores"


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
