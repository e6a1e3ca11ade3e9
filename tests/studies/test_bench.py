"""The bench of a tiny pair: what it says of bytes and ratios, and what it refuses."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from speculative import cli
from speculative.loading import Resolved
from speculative.measurement import hardware
from speculative.reporting import bench as report
from speculative.rows import memory
from speculative.rows.config import RowConfig
from speculative.studies import bench
from tests import saved
from tests.printed import printed

CACHE, SOURCE = 64, 32


@pytest.fixture(scope="module")
def found(saved_pair: tuple[pathlib.Path, pathlib.Path]) -> bench.Bench:
    config = RowConfig(
        task="debian_ende",
        target=str(saved_pair[0]),
        draft=str(saved_pair[1]),
        temperature=0.0,
        source_length=SOURCE,
        max_length=CACHE,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bench, "GAMMAS", (2,))
        patched.setattr(bench, "TURNS", 2)
        patched.setattr(hardware, "read_bandwidth", lambda: 1e9)
        return bench.bench(config, (1, 3), bench.resolve(config, (1, 3)), lambda what, share: None)


def test_bytes_are_parameters_and_what_the_caches_hold(found: bench.Bench) -> None:
    t = saved.TARGET
    width = t.num_heads * t.head_dim
    # Kernels are laid out in panels of 32 outputs.
    kernels = [(t.emb_dim, 3 * width), (width, t.emb_dim), (t.emb_dim, width), (width, t.emb_dim)]
    kernels += [(t.emb_dim, t.mlp_dim)] * 2 + [(t.mlp_dim, t.emb_dim), (t.emb_dim, t.vocab_size)]
    numbers = sum(inputs * -(-outputs // 32) * 32 for inputs, outputs in kernels)
    numbers += 4 * t.emb_dim + t.num_heads * t.num_buckets  # Norms, and the table of distances.
    assert found.parameters == numbers
    for one in found.passes:
        caches = 2 * width * (CACHE // 2 + one.width) + 2 * width * SOURCE
        assert one.bytes == 4 * (numbers + caches)
    assert [one.width for one in found.passes] == [1, 3]
    assert [one.width for one in found.draft_passes] == [1, 2]


def test_what_is_made_of_the_times(found: bench.Bench) -> None:
    one = dataclasses.replace(found.passes[1], ms=2.0, bytes=500_000)
    assert one.bandwidth == pytest.approx(2.5e8)
    assert found.percent(one) == pytest.approx(25)
    written = json.loads(found.to_json())
    assert written["v"]["2"] == found.costs.verify_cost(2)
    assert [entry["width"] for entry in written["passes"]] == [1, 3]
    for entry in written["passes"]:
        assert entry["percent"] == pytest.approx(100 * entry["bytes"] / entry["ms"] * 1e3 / 1e9)
    positive = ["ms_target_step", "ms_prefill_target", "parameters_read_by_step"]
    assert all(written[name] > 0 for name in positive)


def test_the_table_and_the_plot(found: bench.Bench) -> None:
    text = printed(report.show, found)
    printed(report.show, dataclasses.replace(found, draft_passes=[]))
    assert "None" not in text
    assert "float32" in text
    for one in found.passes:
        assert f"{one.ms:.3f}" in text
        assert f"{found.percent(one):.0f}" in text
    (axes,) = report.plot(found).axes
    times = np.asarray(axes.lines[0].get_ydata(), float)
    np.testing.assert_allclose(times, [one.ms for one in found.passes])


def test_a_size_that_does_not_fit_is_refused_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: ("a small device", 2**30))
    monkeypatch.setattr(Resolved, "load", lambda *_: pytest.fail("loaded"))
    arguments = ["bench", "--weights=random", "--target=t5_1_1_xxl", "--draft=t5_1_1_small"]
    assert cli.main(arguments) == 2
    assert "a small device has 1.0 GiB" in capsys.readouterr().err
