"""Describes, for readers, the checkout and the machine of a measurement."""

import contextlib
import functools
import os
import pathlib
import platform
import re
import subprocess

import jax

import speculative


def here() -> dict[str, str]:
    """The conditions of a measurement besides its settings: commit, device and JAX's version."""
    return {"commit": commit(), "device": device(), "jax_version": jax.__version__}


def commit() -> str:
    """The checkout's commit, marked as dirty if files differ; without a checkout, the version.

    Changed results and pages do not count: measurements write them before they read the commit.
    """
    root = pathlib.Path(speculative.__file__).parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            changed = git("status", "--porcelain", "-uno", "--", ".", ":!results", ":!docs")
            return git("describe", "--always") + "-dirty" * bool(changed)
    return speculative.__version__


def device() -> str:
    """The device that computes: an accelerator's kind, or the processor's name and cores."""
    kind = jax.devices()[0]
    if kind.platform != "cpu":
        return kind.device_kind
    file = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)", file.read_text() if file.is_file() else "", re.M)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{name}, {cores()} cores"


@functools.cache
def cores() -> int:
    """The number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
