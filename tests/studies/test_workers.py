"""Workers that share the texts of rows: nothing is lost or doubled, whoever is killed."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from speculative import cli, disk
from speculative.measurement.timing import Costs
from speculative.reporting import page
from speculative.rows import kept, records
from speculative.rows.config import RowConfig
from speculative.studies import sweep, workers
from tests.rows import made

# What does not depend on times.
COUNTED = (
    *("alpha", "alpha_low", "alpha_high", "alpha_accepted", "num_examples", "num_tokens"),
    *("num_target_calls", "tested", "accepted", "tokens_per_call", "tokens_per_call_predicted"),
    *("outputs_identical", "quality_speculative", "accepted_by_position", "draft_parameters"),
)


@pytest.fixture
def configs(
    saved_pair: tuple[pathlib.Path, pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> dict[str, RowConfig]:
    made.no_timing(monkeypatch, Costs(8, 2, 2, {2: 2.4}, {2: 0.5}))
    row = RowConfig(
        task="debian_ende", target=str(saved_pair[0]), draft=str(saved_pair[1]), temperature=0.0,
        gamma=2, max_length=12, rounds=2, num_examples=5, alpha_tokens=30,
    )  # fmt: skip
    # At T = 1 samples count; alpha is of the first texts alone.
    return {"made/t0": row, "made/t1": dataclasses.replace(row, temperature=1.0)}


def counted(found: list[records.Record]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in COUNTED} for one in found]


def texts(folder: pathlib.Path, name: str) -> list[tuple[Any, ...]]:
    found = kept.read(folder / "rows" / name)
    return [(x.number, x.sample, x.autoregressive, x.speculative, x.target_calls) for x in found]


@pytest.fixture
def alone(configs: dict[str, RowConfig], tmp_path: pathlib.Path) -> list[records.Record]:
    return sweep.run(configs, tmp_path / "alone")


@pytest.mark.parametrize("of", [2, 3, pytest.param(7, marks=pytest.mark.long)])
def test_any_number_of_workers_finds_the_same(
    configs: dict[str, RowConfig], alone: list[records.Record], tmp_path: pathlib.Path, of: int
) -> None:
    folder = tmp_path / "shared"
    for worker in range(of):
        sweep.finish(configs, folder, share=(worker, of))
    assert len(records.of_workers(folder)) == len(configs) * min(of, 5)
    found = sweep.run(configs, folder)
    assert counted(found) == counted(alone)
    for name in configs:
        assert texts(folder, name) == texts(tmp_path / "alone", name)
        assert len({one[:2] for one in texts(folder, name)}) == len(texts(folder, name))
    assert {one.workers for one in found} == {min(of, 5)}
    assert {one.c_beside for one in found} == {0.125}
    assert {one.workers for one in alone} == {None}


def test_texts_of_a_worker_that_is_dead_are_taken_up(
    configs: dict[str, RowConfig], alone: list[records.Record], tmp_path: pathlib.Path
) -> None:
    folder, name = tmp_path / "shared", "made/t0"
    sweep.finish({name: configs[name]}, folder, share=(1, 2))
    # Of two texts the second was not measured when worker 1 was killed, within a line.
    lines = (folder / "rows" / name / "examples.1.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2
    (folder / "rows" / name / "examples.1.jsonl").write_text(lines[0] + lines[1][:40])
    (folder / "records.1.jsonl").unlink()
    sweep.work({name: configs[name]}, folder, 0, 2)
    assert texts(folder, name) == texts(tmp_path / "alone", name)
    assert len(records.of_workers(folder)) == 2


def test_a_worker_that_is_alive_keeps_its_texts(
    configs: dict[str, RowConfig], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    with disk.locked(folder / ".lock.1") as ours:
        assert ours
        sweep.work(configs, folder, 0, 2)
        assert [one[0] for one in texts(folder, "made/t0")] == [0, 2, 4]
        with pytest.raises(ValueError, match="Another process is worker 1 of"):
            sweep.work(configs, folder, 1, 2)
    assert not list(folder.glob(".lock*"))


def test_a_report_merges_what_workers_have(
    configs: dict[str, RowConfig], alone: list[records.Record], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "shared"
    sweep.work(configs, folder, 0, 2)
    assert not (folder / "records.jsonl").exists()
    assert counted(page._records(folder)) == counted(alone)
    assert [one.num_examples for one in records.of_workers(folder)] == [3, 3, 2, 2]


def test_workers_of_other_settings_are_refused(
    configs: dict[str, RowConfig], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "shared"
    sweep.finish(configs, folder, share=(0, 2))
    others = {name: dataclasses.replace(row, seed=1) for name, row in configs.items()}
    fresh = {f"{name}b": row for name, row in others.items()}
    for rows, share in ((fresh, (1, 2)), (configs, (1, 3))):
        with pytest.raises(ValueError, match="have other rows, settings, models, texts"):
            sweep.finish(rows, folder, share=share)


def test_pins_of_devices() -> None:
    first, second = (workers.pins("tpu", worker, 2) for worker in (0, 1))
    assert first["TPU_VISIBLE_CHIPS"] == "0,1" and second["TPU_VISIBLE_CHIPS"] == "2,3"
    assert first["TPU_MESH_CONTROLLER_PORT"] != second["TPU_MESH_CONTROLLER_PORT"]
    assert workers.pins("gpu", 3) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert workers.pins("cpu", 3) == {}


@pytest.mark.parametrize(
    ("asked", "mesh", "devices", "found"),
    [("auto", None, 4, 4), ("auto", "model:2", 4, 2), ("3", None, 4, 3), ("auto", "model:4", 4, 1)],
)
def test_workers_by_devices(
    monkeypatch: pytest.MonkeyPatch, asked: str, mesh: str | None, devices: int, found: int
) -> None:
    monkeypatch.setattr(workers, "COUNT", f"print('tpu', {devices})")
    assert workers.count(asked, mesh) == ("tpu", found)


@pytest.mark.parametrize(
    ("asked", "mesh", "said"),
    [
        ("5", None, "5 workers need as many devices, and there are 4"),
        ("3", "model:2", "3 workers need as many groups of 2 devices, and there are 2"),
        ("auto", "model:8", "1 workers need as many groups of 8 devices, and there are 0"),
        ("auto", "model:3", "Workers have meshes of 1, 2, 4, 8 devices each, not 3"),
    ],
)
def test_more_workers_than_devices(
    monkeypatch: pytest.MonkeyPatch, asked: str, mesh: str | None, said: str
) -> None:
    monkeypatch.setattr(workers, "COUNT", "print('tpu', 4)")
    with pytest.raises(ValueError, match=said):
        workers.count(asked, mesh)


def test_workers_that_fail_say_why(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["table", "2", "--checkpoints=demo", "--limit=2", "--workers", "2"]
    assert (
        cli.main([*given, f"--output_dir={tmp_path}", "--dtype=bfloat16", "--draft_mesh=model:2"])
        == 2
    )
    assert "draft_mesh" in capsys.readouterr().err


def test_a_worker_knows_the_machine_by_all_its_cores() -> None:
    """Else workers' examples would be of another machine than the command's."""
    said = "from speculative.rows import environment; from speculative.studies import workers; "
    said += "import json, os; workers.take_cores(0, 64); "
    said += "print(json.dumps([environment.cores(), len(os.sched_getaffinity(0))]))"
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    cores, taken = json.loads(found.stdout)
    assert taken == 1 <= cores


def test_hosts_leave_one_another_their_texts(
    configs: dict[str, RowConfig], alone: list[records.Record], tmp_path: pathlib.Path
) -> None:
    for host, here in enumerate((range(2), range(2, 4))):
        sweep.work(configs, tmp_path / str(host), here[0], 4, here)
        numbers = {one[0] for one in texts(tmp_path / str(host), "made/t0")}
        assert numbers == {number for number in range(5) if number % 4 in here}
    for file in (tmp_path / "1").rglob("*.*.jsonl"):  # As they are copied into one bucket.
        (tmp_path / "0" / file.relative_to(tmp_path / "1")).write_bytes(file.read_bytes())
    assert counted(page._records(tmp_path / "0")) == counted(alone)


def test_another_number_of_workers_goes_on(
    configs: dict[str, RowConfig], alone: list[records.Record], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "shared"
    sweep.begin_workers(folder, 2)
    sweep.finish(configs, folder, share=(0, 2))  # The texts 0, 2 and 4; the other worker is killed.
    sweep.begin_workers(folder, 3)
    assert not records.of_workers(folder) and len(texts(folder, "made/t0")) == 3
    for worker in range(3):
        sweep.finish(configs, folder, share=(worker, 3))
    assert counted(page._records(folder)) == counted(alone)
    # Rows that are whole are nothing to do for workers.
    sweep.run(configs, folder)
    sweep.begin_workers(folder, 2)
    assert sweep.finish(configs, folder, share=(0, 2)) == []


def test_devices_that_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "1,3")
    assert workers.pins("gpu", 1) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert workers.pins("tpu", 0, 2)["TPU_VISIBLE_CHIPS"] == "1,3"
