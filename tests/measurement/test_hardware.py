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


@pytest.mark.parametrize(("native", "reads"), [(True, 1), (False, hardware.READS)])
def test_the_bandwidth_is_bytes_over_the_median_of_seconds(
    monkeypatch: pytest.MonkeyPatch, native: bool, reads: int
) -> None:
    ran = []

    def elapsed(run: hardware.Callable[[], object]) -> float:
        ran.append(run())
        return {1: 50.0, 2: 0.25, 3: 7.0}.get(len(ran), 0.5)  # The first one compiles.

    monkeypatch.setattr(hardware, "elapsed", elapsed)
    monkeypatch.setattr(kernels, "native", lambda: native)
    monkeypatch.setattr(kernels, "total", lambda values: values.sum())
    assert hardware.read_bandwidth(4096) == reads * 8192
    assert [float(total) for total in ran] == [1024] * 10  # Ones, all of them read.
