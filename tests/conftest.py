"""A core for each of several workers, and what tests of many folders share."""

import os
import pathlib

import pytest

# Set before JAX counts the cores: threads of two workers that wait for one another by spinning,
# as the CPU kernels' do, would take the cores from each other.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER and hasattr(os, "sched_setaffinity"):
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(WORKER.removeprefix("gw")) % len(CORES)]})

from tests import saved  # noqa: E402


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders of a tiny random target and draft."""
    folder = tmp_path_factory.mktemp("pair")
    saved.save(folder / "target", saved.TARGET, 0)
    saved.save(folder / "draft", saved.DRAFT, 1)
    return folder / "target", folder / "draft"
