"""A core for each of several workers, compiled programs for all of them, and what tests share."""

import atexit
import os
import pathlib
import shutil
import tempfile

import pytest

# Set before JAX counts the cores: threads of two workers that wait for one another by spinning,
# as the CPU kernels' do, would take the cores from each other.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER and hasattr(os, "sched_setaffinity"):
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(WORKER.removeprefix("gw")) % len(CORES)]})

# Most of the time is compilation, so what one worker or program compiled serves the others. The
# folder is the run's own, which leaves nothing behind, unless the user has named one to keep.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="speculative-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)

from tests import saved  # noqa: E402


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders of a tiny random target and draft."""
    folder = tmp_path_factory.mktemp("pair")
    saved.save(folder / "target", saved.TARGET, 0)
    saved.save(folder / "draft", saved.DRAFT, 1)
    return folder / "target", folder / "draft"
