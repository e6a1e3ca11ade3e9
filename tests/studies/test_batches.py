"""Throughput over batch size: what is made of times, and a tiny pair measured."""

import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from speculative import cli
from speculative.reporting import bench as report
from speculative.rows import memory
from speculative.rows.config import RowConfig
from speculative.studies import batches
from speculative.studies.batches import Batch, Batches, Timed, crossover, steps

CONFIG = RowConfig(task="debian_ende", target="big", draft="small", temperature=0.0)
ROUNDS = [  # Of a machine that is half as fast in the second one.
    (Timed(2.0, 9.0, 2.0, 1.0), Timed(1.0, 11.0, 3.0, 2.0)),
    (Timed(4.0, 18.0, 4.0, 2.0), Timed(2.0, 22.0, 6.0, 4.0)),
    (Timed(2.0, 9.0, 2.0, 1.0), Timed(1.0, 11.0, 3.0, 2.0)),
]
FOUR = (Timed(1.0, 10.0, 2.0, 1.0), Timed(2.0, 40.0, 3.0, 2.0))
# 200 tokens of 10 texts; at batch 1 speculation halves the time, at batch 4 it doubles it.
FOUND = Batches(
    CONFIG, 10, (200, 200), 2.5,
    [Batch(1, 1, (200, 80), (10, 10), ROUNDS), Batch(4, 2, (100, 48), (12, 8), [FOUR] * 3)],
)  # fmt: skip


def test_rates_and_speedups() -> None:
    one, four = FOUND.batches
    assert FOUND.rate(one, 0) == 100 and FOUND.rate(four, 1) == 200
    assert FOUND.speedup(one) == 2 and FOUND.speedup(four) == 0.5
    # 200 steps of 9 ms and 10 texts of 2 ms; 80 of 11 and 10 of 3.
    assert FOUND.rate(one, 0, predicted=True) == pytest.approx(200 / 1.82)
    assert FOUND.rate(one, 1, predicted=True) == pytest.approx(200 / 0.91)
    assert FOUND.speedup(one, predicted=True) == pytest.approx(1.82 / 0.91)
    # The texts twice: of 20 texts 12 begin apart, and 8 right after another one.
    assert FOUND.rate(four, 0, predicted=True) == pytest.approx(400 / 1.032)
    longer = dataclasses.replace(FOUND, tokens=(200, 220))
    assert longer.speedup(one) == pytest.approx(2.2)


def test_a_crossover_has_the_interval_of_its_rounds() -> None:
    """A median of three rounds, two of them equal: resampled, the third one is it at times."""
    found = FOUND.crossover()
    assert found.size == pytest.approx(math.exp(2 / 3 * math.log(4)))
    assert found.low == found.high == found.size  # Rounds differ in time, not in speed-up.
    rounds = [FOUR, FOUR, (Timed(3.0, 1.0, 1.0, 1.0), FOUR[1])]
    varied = dataclasses.replace(FOUND.batches[1], rounds=rounds)
    found = dataclasses.replace(FOUND, batches=[FOUND.batches[0], varied]).crossover()
    assert found.size == pytest.approx(math.exp(2 / 3 * math.log(4)))
    # The third round alone would still pay at 4: 7 of 27 samples have it as their median.
    assert (found.low, found.high) == (found.size, 4)


def test_where_a_speedup_falls_to_1() -> None:
    assert crossover([1, 4], [2.0, 0.5]) == pytest.approx(math.exp(2 / 3 * math.log(4)))
    assert crossover([1, 2, 4], [2.0, 1.5, 1.2]) is None
    assert crossover([1, 2], [0.9, 0.8]) == 1
    assert crossover([1, 2, 4], [1.5, 1.0, 0.8]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("calls", "batch_size", "expected"),
    [
        ([3, 1, 2], 1, (6, 3)),  # One after the other.
        ([3, 1, 2], 2, (3, 2)),  # The second row takes the third text.
        ([3, 1, 2], 8, (3, 1)),
        ([1, 1, 1, 9], 2, (10, 2)),
    ],
)
def test_steps_of_a_batch(calls: list[int], batch_size: int, expected: tuple[int, int]) -> None:
    assert steps(calls, batch_size) == expected


def test_the_table_the_plot_and_the_record() -> None:
    console = Console(file=io.StringIO(), width=120)
    report.show_batches(FOUND, console)
    assert isinstance(console.file, io.StringIO)
    said = " ".join(console.file.getvalue().split())
    assert "1 100 1.00 200 1.00 2.00 2.00" in said
    assert "Speculation stops paying at a batch of 2.5 (2.5 to 2.5); predicted at a" in said
    written = json.loads(FOUND.to_json())
    assert [one["speedup"] for one in written["batches"]] == [2, 0.5]
    assert written["crossover"] == dataclasses.asdict(FOUND.crossover())
    assert written["crossover_predicted"]["size"] == FOUND.crossover(predicted=True).size
    figure = report.plot_batches(FOUND)
    drawn = [np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines[:3:2]]
    assert drawn == [[100, 400], [200, 200]]


def test_a_pair_is_measured(
    saved_pair: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[int] = []

    def timed(*given: Any) -> dict[tuple[str, int], Callable[[int], float]]:
        """Loops that take half a second to begin, and 1 or 2 ms a step."""
        _, _, gammas, sources, cache, _, held = given
        asked.append(len(sources))
        assert gammas == [2] and held == 6 and cache > held + 2
        return {
            ("verify", 0): lambda iterations: 0.5 + 1e-3 * iterations,
            ("step", 2): lambda iterations: 0.5 + 2e-3 * iterations,
        }

    monkeypatch.setattr(batches, "timed_calls", timed)
    monkeypatch.setattr(batches, "elapsed", lambda run: run())
    monkeypatch.setattr(batches, "ROUNDS", 1)
    target, draft = map(str, saved_pair)
    command = ["bench", "--target", target, "--draft", draft, "--task", "debian_ende"]
    command += ["--limit", "5", "--max_length", "12", "--gamma", "2"]
    assert cli.main([*command, "--batch_sizes=4", "--output_dir", str(tmp_path)]) == 0
    assert asked == [1, 4]
    found = json.loads((tmp_path / "batches.json").read_text())
    assert (tmp_path / "batches.png").stat().st_size > 10_000
    assert [one["batch_size"] for one in found["batches"]] == [1, 4]
    assert found["texts"] == 5 and found["tokens"][0] == found["tokens"][1]
    one, four = found["batches"]
    assert one["steps"][0] == 2 * found["tokens"][0]  # A call a token.
    assert (one["passes"], four["passes"]) == (2, 7)  # 8 texts for each row.
    assert four["steps"][0] < 3 * one["steps"][0]
    assert one["begins"] == [10, 10]  # One after the other.
    for found_at in (one, four):
        ((alone, fast),) = found_at["rounds"]
        assert [alone["step_ms"], fast["step_ms"]] == pytest.approx([1, 2])
        assert min(alone["apart_ms"], fast["apart_ms"], fast["together_ms"]) >= 0
    assert "Speculation stops paying" in capsys.readouterr().out


def test_a_batch_that_memory_does_not_hold_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "device_bytes", lambda: ("this machine", 2**29))
    assert cli.main(["bench", "--batch_sizes=2,1024"]) == 2
    said = capsys.readouterr().err
    assert "1024 rows of debian_target with debian_draft_hidden do not fit the memory" in said
    assert "the largest batch that does has" in said
