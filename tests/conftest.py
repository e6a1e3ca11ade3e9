"""How the workers share cores and compiled programs, and what tests share."""

import atexit
import gc
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

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

# A child says nothing of it either, where another one is just writing what it reads; see the
# filters of pyproject.toml.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache:UserWarning"

# The programs are small and run once, so the compiler's optimizations cost more than they save:
# without them the suite takes half the time. XLA ends a process that names a flag it does not
# know, so a child tries them. `XLA_FLAGS= make test` runs what users run.
# Four devices are made of the CPU, for the tests of meshes; the others use the first.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_force_host_platform_device_count=4"
)
EMITTERS = "--xla_cpu_use_fusion_emitters=false"  # JAX 0.12 no longer has it.


def known(flags: str) -> bool:
    """Whether XLA knows these flags."""
    tried = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
    given = os.environ | {"XLA_FLAGS": flags}
    return subprocess.run(tried, env=given, capture_output=True).returncode == 0


if "XLA_FLAGS" not in os.environ:  # The workers, which inherit it, do not try again.
    for tried in (f"{FLAGS} {EMITTERS}", FLAGS):
        if known(tried):
            os.environ["XLA_FLAGS"] = tried
            break

# Tracing makes many objects that live on, which the collector would look through again and again:
# this saves a twentieth of the time.
gc.set_threshold(1_000_000, 50, 100)

import jax.core  # noqa: E402
import numpy as np  # noqa: E402

from speculative.decoding import loop, programs, queue, settings  # noqa: E402
from speculative.rows import memory  # noqa: E402
from tests import saved  # noqa: E402


def pytest_collection_finish() -> None:
    """What was imported stays."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """A worker ends at once: to look through all that was traced and compiled takes seconds."""
    gc.freeze()
    if WORKER:
        atexit.register(os._exit, 0)  # Before what JAX has registered.


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders of a tiny random target and draft."""
    folder = tmp_path_factory.mktemp("pair")
    saved.save(folder / "target", saved.TARGET, 0)
    saved.save(folder / "draft", saved.DRAFT, 1)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="session")
def pair_options(saved_pair: tuple[pathlib.Path, pathlib.Path]) -> list[str]:
    """The options of a command that name this pair."""
    return ["--target", str(saved_pair[0]), "--draft", str(saved_pair[1])]


OPTIMIZED = {"xla_backend_optimization_level": 1} if os.environ.get("XLA_FLAGS") == FLAGS else {}
DRAWS = jax.jit(inspect.unwrap(settings._draws), static_argnums=2, compiler_options=OPTIMIZED)
DRAWN = settings._draws


def drawn(seed: np.uint32, examples: Any, shape: tuple[int, ...]) -> jax.Array:
    """A few texts' are cut from more, which changes none (`test_settings`): fewer programs."""
    if (rows := len(examples)) > 16 or not isinstance(examples, np.ndarray):
        return DRAWN(seed, examples, shape)
    length, *sizes = shape
    found = DRAWN(seed, np.resize(examples, 16), (length + -length % 64, *sizes))
    cut = found if isinstance(found, jax.core.Tracer) else np.asarray(found)
    return jax.device_put(cut[:rows, :length])


settings._draws = drawn


@pytest.fixture(scope="module", autouse=True)
def spared() -> None:
    """A worker that compiled thousands of programs does not run out of memory maps."""
    memory.spare_maps()


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops with a draft are optimized: on 100,000 texts that saves more than it costs."""
    monkeypatch.setattr(programs, "compiler_options", lambda *_: tuple(OPTIMIZED.items()))
    monkeypatch.setattr(settings, "_draws", DRAWS)


@pytest.fixture
def recompiled() -> Iterator[None]:
    """No program compiled with a planted fault is used by another test, nor the reverse."""
    programs = loop.decode, queue.run
    for program in programs:
        program.clear_cache()
    yield
    for program in programs:
        program.clear_cache()
