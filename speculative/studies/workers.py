"""Measures a table's rows in several processes, each on chips or cores of its own.

Workers share only the folder of results. Worker K of N has the texts whose number modulo N is K, a
lock `.lock.K`, and its own files. When its texts are done, it takes over those of workers whose
locks are free because they have ended or were killed.
"""

import contextlib
import glob
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from absl import logging

from speculative import checks, disk, progress
from speculative.rows import environment

AUTO = "auto"  # Instead of a number of workers: one for each device, core, or mesh of devices.
SECONDS = 0.5  # Between checks of other processes.
# A worker's chips along the axes of its host, in the TPU runtime's format.
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
PORT = 8476  # The port of the first worker's TPU runtime.
CHIPS = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*"  # The files of a TPU's chips.
COUNT = "import jax; print(jax.default_backend(), jax.local_device_count())"


def count(asked: str, mesh: str | None) -> tuple[str, int]:
    """The platform of this machine, and the number of workers, each of which has a whole `mesh`.

    `asked` is that number as text, or `AUTO`. Devices are counted by another process, because a
    process that has used a TPU keeps hold of it. TPU chips are counted by their files instead,
    because such a process would wait for the chips of other hosts. Raises ValueError if there are
    too few devices for the workers.
    """
    chips = [file for pattern in CHIPS for file in glob.glob(pattern)]
    if chips and importlib.util.find_spec("libtpu"):
        visible = os.environ.get("TPU_VISIBLE_CHIPS")
        return "tpu", _wanted(asked, mesh, len(visible.split(",") if visible else chips))
    counted = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True)
    if counted.returncode:
        last = (counted.stderr.strip().splitlines() or [""])[-1]
        raise ValueError(f"The devices of this machine cannot be counted ({last}).")
    platform, devices = counted.stdout.split()
    # On a CPU each worker has its own XLA devices, and cores may be shared.
    if platform == "cpu":
        return platform, environment.cores() if asked == AUTO else int(asked)
    return platform, _wanted(asked, mesh, int(devices))


def _wanted(asked: str, mesh: str | None, there: int) -> int:
    """The number of workers that `asked` means; ValueError if `there` devices are too few."""
    each = checks.devices(mesh)
    most = there // each
    if each not in BOUNDS:
        known = ", ".join(map(str, BOUNDS))
        raise ValueError(f"Workers have meshes of {known} devices each, not {each}.")
    wanted = max(most, 1) if asked == AUTO else int(asked)
    if wanted > most:
        noun = f"groups of {each} devices" if mesh else "devices"
        raise ValueError(f"{wanted} workers need as many {noun}, and there are {most} (--workers).")
    return wanted


def pins(platform: str, worker: int, each: int = 1) -> dict[str, str]:
    """The environment variables that show a worker's JAX only its own `each` devices."""
    variable = "TPU_VISIBLE_CHIPS" if platform == "tpu" else "CUDA_VISIBLE_DEVICES"
    # A user may have left some of the devices to others.
    visible = [one for one in os.environ.get(variable, "").split(",") if one]
    places = range(worker * each, (worker + 1) * each)
    own = ",".join(visible[place] if visible else str(place) for place in places)
    if platform == "tpu":
        return {
            variable: own,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[each],
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{PORT + worker}",
            "TPU_MESH_CONTROLLER_PORT": str(PORT + worker),
        }
    return {variable: own} if platform in ("gpu", "cuda") else {}


def end_with_parent() -> None:
    """Ends this process soon after its parent process ends, however that happens."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def take_cores(worker: int, workers: int) -> None:
    """Restricts this process to its share of the cores that it may use, if there are enough."""
    environment.cores()  # This caches the number of all cores, which results report.
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[worker::workers] or cores)


def run(
    arguments: Sequence[str],
    folder: pathlib.Path,
    platform: str,
    workers: int,
    devices: int,
    texts: Mapping[str, int],
    host: tuple[int, int] = (0, 1),
) -> None:
    """Runs a command in several processes, with `--worker=K/N`, and waits until they end.

    `texts` are the numbers of texts of each row, by its name. `host` is (K, N) for number K of N
    hosts. A worker that fails leaves its texts to the others of its host; if all fail, ValueError
    quotes the first one's error.
    """
    running: dict[int, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:
        for place in range(workers):
            worker, of = host[0] * workers + place, host[1] * workers
            log = stack.enter_context((folder / f"worker.{worker}.log").open("wb"))
            command = [sys.executable, "-m", "speculative.cli", *arguments]
            running[worker] = subprocess.Popen(
                [*command, f"--worker={worker}/{of}"],
                env=os.environ | pins(platform, place, devices),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            with progress.bar(f"{workers} workers") as on_progress:
                while any(one.poll() is None for one in running.values()):
                    share = _done(folder, texts) * host[1] / max(1, sum(texts.values()))
                    on_progress("decoding", min(1.0, share))
                    time.sleep(SECONDS)
        except KeyboardInterrupt:
            for one in running.values():
                one.terminate()
            for one in running.values():
                one.wait()
            raise KeyboardInterrupt(
                f"; {_done(folder, texts)} of {sum(texts.values())} texts are in {folder}; rerun "
                "to resume"
            ) from None
    failed = {worker: one.returncode for worker, one in running.items() if one.returncode}
    if len(failed) == workers:
        raise ValueError(f"All workers failed; the first one says: {_fault(folder, min(failed))}")
    for worker, code in failed.items():
        message = "Worker %s ended with exit code %s; others take over its texts. It says: %s"
        logging.warning(message, worker, code, _fault(folder, worker))


def _done(folder: pathlib.Path, texts: Mapping[str, int]) -> int:
    """The number of texts that workers have measured so far."""
    files = (file for name in texts for file in (folder / "rows" / name).glob("examples*.jsonl"))
    return sum(file.read_bytes().count(b"\n") for file in files)


def _fault(folder: pathlib.Path, worker: int) -> str:
    """The last error in a worker's log or, if there is none, its last line."""
    lines = disk.text(folder / f"worker.{worker}.log").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return [*lines, *errors][-1].removeprefix("error: ") if lines else "nothing."
