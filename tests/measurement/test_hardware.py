"""What the device does at best: the sums are right, and so is what is made of the times."""

import jax
import numpy as np
import pytest

from speculative.backends.cpu import kernels
from speculative.measurement import hardware


@pytest.mark.skipif(not kernels.native(), reason="no C++ compiler")
@pytest.mark.parametrize("count", [1, 63, 64, 1000, 2**18 + 7])
def test_a_read_reads_everything(count: int) -> None:
    """Whole numbers, whose sum float32 holds exactly, in whatever order threads add them."""
    values = np.random.default_rng(count).integers(-8, 9, count).astype(np.float32)
    assert float(kernels.total(jax.device_put(values))) == values.astype(np.float64).sum()


def test_times_are_medians_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, takes = 0.0, iter([50.0, 2.0, 9.0, 1.0])

    def run() -> np.ndarray:
        nonlocal now
        now += next(takes)
        return np.zeros(1)

    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now)
    assert hardware.seconds(run, rounds=3) == 2.0


def test_the_bandwidth_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def seconds(run: hardware.Callable[[], object]) -> float:
        ran.append(run())
        return 0.5

    monkeypatch.setattr(hardware, "seconds", seconds)
    assert hardware.read_bandwidth(4096) == 8192
    assert float(ran[0]) == 1024  # Ones, all of them read.
    monkeypatch.setattr(kernels, "native", lambda: False)
    assert hardware.read_bandwidth(4096) == hardware.READS * 8192
    assert float(ran[1]) == 1024
