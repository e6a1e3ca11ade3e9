"""Throughput over batch size: what is made of times, and a tiny pair measured."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from speculative import cli
from speculative.reporting import bench as report
from speculative.rows import memory
from speculative.rows.config import RowConfig
from speculative.studies import bench
from speculative.studies.bench import Batch, Batches
from tests.printed import printed

CONFIG = RowConfig(task="debian_ende", target="big", draft="small", temperature=0.0)
# 200 tokens of 10 texts, at batch 4 twice: at batch 1 speculation halves the time, at batch 4 it
# doubles it. The machine is half as fast in the second round.
FOUND = Batches(
    CONFIG, 10, (200, 200), 2.5,
    [Batch(1, 1, [(2.0, 1.0), (4.0, 2.0), (2.0, 1.0)]), Batch(4, 2, [(1.0, 2.0)] * 3)],
)  # fmt: skip


def test_rates_and_speedups() -> None:
    one, four = FOUND.batches
    assert FOUND.rate(one, 0) == 100 and FOUND.rate(four, 1) == 200
    assert FOUND.speedup(one) == 2 and FOUND.speedup(four) == 0.5
    longer = dataclasses.replace(FOUND, tokens=(200, 220))
    assert longer.speedup(one) == pytest.approx(2.2)


def test_the_table_the_plot_and_the_record() -> None:
    said = " ".join(printed(report.show_batches, FOUND, width=120).split())
    assert "1 100 1.00 200 1.00 2.00" in said
    assert "4 400 4.00 200 1.00 0.50" in said
    written = json.loads(FOUND.to_json())
    assert [one["speedup"] for one in written["batches"]] == [2, 0.5]
    figure = report.plot(FOUND)
    drawn = [np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines[:2]]
    assert drawn == [[100, 400], [200, 200]]


@pytest.mark.long
def test_a_pair_is_measured(
    saved_pair: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    target, draft = map(str, saved_pair)
    command = ["bench", "--target", target, "--draft", draft, "--task", "debian_ende"]
    command += ["--limit", "5", "--max_length", "12", "--gamma", "2"]
    assert cli.main([*command, "--batch_sizes=4", "--output_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "batches.json").read_text())
    assert (tmp_path / "batches.png").stat().st_size > 10_000
    assert [one["batch_size"] for one in found["batches"]] == [1, 4]
    assert found["texts"] == 5 and found["tokens"][0] == found["tokens"][1]
    one, four = found["batches"]
    assert (one["passes"], four["passes"]) == (2, 7)  # 8 texts for each row.
    assert [np.shape(batch["seconds"]) for batch in (one, four)] == [(1, 2), (1, 2)]
    assert "tokens/s alone" in capsys.readouterr().out


def test_a_batch_that_memory_does_not_hold_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: ("this machine", 2**29))
    assert cli.main(["bench", "--batch_sizes=2,1024"]) == 2
    said = capsys.readouterr().err
    assert "1024 rows of debian_target with debian_draft_hidden do not fit the memory" in said
    assert "the largest batch that does has" in said
