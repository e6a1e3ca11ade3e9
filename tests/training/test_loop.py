"""The loop: it learns, and a run that was killed goes on as if it had not been."""

import dataclasses
import functools
import json
import pathlib
import shutil
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from speculative import disk
from speculative.models import T5
from speculative.training import data, loop
from speculative.training.train import CrossEntropy
from tests.training import tiny

OBJECTIVE = CrossEntropy(tiny.MODEL)


mean_gradient = jax.jit(loop.mean_gradient, static_argnums=(0, 5))


@functools.cache
def initial() -> dict:
    return tiny.MODEL.init(jax.random.key(0))


def start() -> dict:
    """A copy, for the first step takes its memory."""
    return jax.tree.map(jax.numpy.array, initial())


def log(folder: pathlib.Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("tokens_per_second") > 0 and line.pop("seconds") >= 0
        assert line.pop("gradient_norm") > 0
    return lines


def fit(folder: pathlib.Path, train: data.Mixture, **changes) -> tuple[dict, bool]:
    held_out = {"held": tiny.mixture(40, 1).once()}
    fitted = loop.fit(OBJECTIVE, start, tiny.CONFIG, train, held_out, folder, **changes)
    return fitted.params, fitted.taken is not None


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict]:
    folder = tmp_path_factory.mktemp("straight")
    params, finished = fit(folder, tiny.mixture())
    assert finished
    return folder, params


class Killed(Exception):
    pass


class KillingMixture(data.Mixture):
    """Dies when the 8th batch is asked for."""

    def batches(
        self, seed: int, start_step: int = 0, rows: np.ndarray | None = None
    ) -> Iterator[data.Batch]:
        for i, batch in enumerate(super().batches(seed, start_step, rows)):
            if start_step + i == 7:
                raise Killed
            yield batch


def equal(a: dict, b: dict) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.long
def test_a_run_that_was_stopped_and_killed_resumes_exactly(
    tmp_path: pathlib.Path, straight: tuple[pathlib.Path, dict]
) -> None:
    """Stopped at its deadline, after the first line of the log; then killed; then it ends."""
    _, finished = fit(tmp_path, tiny.mixture(), deadline=time.monotonic())
    assert not finished
    assert [line["step"] for line in log(tmp_path)] == [2]
    killing = KillingMixture([(tiny.examples(300, 0), 1.0)], 8, tiny.SOURCE, tiny.TARGET)
    with pytest.raises(Killed):
        fit(tmp_path, killing)
    # Killed at step 7: the log is at 6, the checkpoint at 4; and the kill tore a line.
    assert [line["step"] for line in log(tmp_path)] == [2, 4, 6]
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    params, finished = fit(tmp_path, tiny.mixture())
    assert finished
    assert log(tmp_path) == log(straight[0])
    equal(params, straight[1])


def test_a_folder_is_trained_in_by_one_process(tmp_path: pathlib.Path) -> None:
    with disk.owned(tmp_path), pytest.raises(ValueError, match="Another process is writing"):
        fit(tmp_path, tiny.mixture())
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_for_a_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is written; with a byte more the run goes on."""
    arrays = jax.tree.leaves(loop.begin(tiny.CONFIG, start()))
    needed = sum(np.asarray(array).nbytes for array in arrays)
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    said = f"it takes {needed / 1e9:.3g} GB.*; there is none before it. Make room"
    with pytest.raises(OSError, match=said):
        fit(tmp_path, tiny.mixture(), deadline=time.monotonic())
    assert not list((tmp_path / loop.CHECKPOINTS).iterdir())
    free = needed
    fit(tmp_path, tiny.mixture(), deadline=time.monotonic())
    assert [file.name for file in (tmp_path / loop.CHECKPOINTS).iterdir()] == ["2"]


def test_a_finished_run_is_not_run_again(straight: tuple[pathlib.Path, dict]) -> None:
    before = (straight[0] / "log.jsonl").read_text()
    params, finished = fit(straight[0], tiny.mixture())
    assert finished
    assert (straight[0] / "log.jsonl").read_text() == before
    equal(params, straight[1])


def test_the_log_says_what_was_measured(straight: tuple[pathlib.Path, dict]) -> None:
    lines = log(straight[0])
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "held/loss" in line] == [6, 12]
    # The last update of the warm-up, the peak, then half a cosine down to nearly 0.
    assert lines[0]["learning_rate"] == pytest.approx(0.025)
    cosine = 0.05 * (1 + np.cos(np.pi * 9 / 10)) / 2
    assert lines[-1]["learning_rate"] == pytest.approx(cosine, rel=1e-4)


def test_the_held_out_loss_is_the_mean_over_all_tokens(straight: tuple[pathlib.Path, dict]) -> None:
    loss = tokens = 0.0
    for batch in tiny.on_device(tiny.mixture(40, 1).once()):
        loss += float(jax.jit(OBJECTIVE)(straight[1], (), batch, None)[1]["loss"])
        tokens += int(batch["decoder_loss_weights"].sum())
    assert log(straight[0])[-1]["held/loss"] == pytest.approx(loss / tokens, rel=1e-5)


def test_a_constant_learning_rate() -> None:
    changes = {"warmup_steps": 0, "decay": "constant", "learning_rate": 1e-3}
    schedule = dataclasses.replace(tiny.CONFIG, **changes).schedule()
    assert [np.asarray(schedule(step)) for step in range(13)] == pytest.approx([1e-3] * 13)
    schedule = dataclasses.replace(tiny.CONFIG, **changes | {"warmup_steps": 2}).schedule()
    found = [np.asarray(schedule(step)) for step in (0, 1, 2, 7, 12)]
    assert found == pytest.approx([0, 0.5e-3, 1e-3, 1e-3, 1e-3])


def test_the_learning_rate_of_t5s_pre_training() -> None:
    """1 / sqrt(max(step, 10,000)), by T5X's two factors of that name."""
    changes = {"warmup_steps": 10_000, "decay": "rsqrt", "learning_rate": 0.01}
    schedule = dataclasses.replace(tiny.CONFIG, **changes).schedule()
    steps = (0, 1, 9_999, 10_000, 40_000, 1_000_000)
    found = [np.asarray(schedule(step)) for step in steps]
    assert found == pytest.approx([max(step, 10_000) ** -0.5 for step in steps])


@pytest.mark.parametrize("microbatches", [2, 8])
def test_the_parts_of_a_batch_add_up_to_its_gradient(microbatches: int) -> None:
    """Rows differ in their tokens, so a mean of the parts' means would be another gradient."""
    model = T5(tiny.MODEL.config.replace(dropout_rate=0.0))
    objective, params, key = CrossEntropy(model), initial(), jax.random.key(1)
    (batch, *_) = tiny.on_device([next(tiny.mixture().batches(0))])
    batch["decoder_loss_weights"] = batch["decoder_loss_weights"].at[1:].set(0).at[2, :2].set(1)

    def mean(params: dict) -> jax.Array:
        total, _ = objective(params, (), batch, None)
        return total / batch["decoder_loss_weights"].sum()

    gradient, metrics = mean_gradient(objective, params, (), batch, key, microbatches)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
        gradient,
        jax.jit(jax.grad(mean))(params),
    )
    whole = jax.jit(objective)(params, (), batch, None)[1]
    for name, value in metrics.items():
        assert float(value) == pytest.approx(float(whole[name]), rel=1e-5)


@pytest.mark.long
def test_parts_of_a_batch_drop_out_differently() -> None:
    """A batch of one row, eight times: as many masks, so another gradient than that of one."""
    (batch, *_) = tiny.on_device([next(tiny.mixture().batches(0))])
    batch = {name: jax.numpy.repeat(x[:1], 8, axis=0) for name, x in batch.items()}
    one = {name: x[:1] for name, x in batch.items()}
    parts = mean_gradient(OBJECTIVE, initial(), (), batch, jax.random.key(1), 8)[1]
    alone = mean_gradient(OBJECTIVE, initial(), (), one, jax.random.key(1), 1)[1]
    assert float(parts["loss"]) != pytest.approx(8 * float(alone["loss"]), rel=1e-3)


def test_every_step_has_a_dropout_key_of_its_own(tmp_path: pathlib.Path) -> None:
    """Told by an objective whose "loss" is a number drawn with it."""

    def drawn(params: Any, frozen: Any, batch: Any, dropout_key: Any) -> tuple[jax.Array, dict]:
        loss = jax.random.uniform(dropout_key) * batch["decoder_loss_weights"].sum()
        return (params["x"] ** 2).sum(), {"loss": loss}

    config = dataclasses.replace(tiny.CONFIG, log_every=1)
    loop.fit(drawn, lambda: {"x": jax.numpy.ones(2)}, config, tiny.mixture(), {}, tmp_path)
    losses = [line["loss"] for line in log(tmp_path)]
    assert len(losses) == len(set(losses)) == config.steps


def test_training_learns(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(
        tiny.CONFIG, steps=200, warmup_steps=20, log_every=100, evaluate_every=200,
        checkpoint_every=200,
    )  # fmt: skip
    held_out = {"held": tiny.mixture(40, 1).once()}
    loop.fit(OBJECTIVE, start, config, tiny.mixture(2000), held_out, tmp_path)
    # A model that knows the letters' frequencies alone has about log(12) = 2.5.
    assert log(tmp_path)[-1]["held/loss"] < 1.5


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="loss is nan at step 2 .* which starts anew"):
        broken = functools.partial(jax.tree.map, lambda x: x * np.nan, initial())
        loop.fit(OBJECTIVE, broken, tiny.CONFIG, tiny.mixture(), {}, tmp_path)


def test_a_run_that_overflows_goes_on_at_a_lower_rate(tmp_path: pathlib.Path) -> None:
    """Its last checkpoint is finite still, and lost: of the older one as much is left to learn."""
    draws = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)

    def square(params: Any, frozen: Any, batch: Any, dropout_key: Any) -> tuple[jax.Array, dict]:
        tokens = batch["decoder_loss_weights"].sum()
        loss = tokens * (params["x"] ** 2).sum()
        return loss, {"loss": loss}

    wild = dataclasses.replace(
        tiny.CONFIG, steps=8, log_every=1, evaluate_every=8, checkpoint_every=1, warmup_steps=1,
        learning_rate=1e25,
    )  # fmt: skip
    kept, begins = tmp_path / "checkpoints", lambda: {"x": jax.numpy.array(draws)}
    for _ in range(2):  # The same again does not get further back.
        with pytest.raises(ValueError, match=r"at step 3 .* resumes from its checkpoint of step 1"):
            loop.fit(
                square, lambda: {"x": jax.numpy.array(draws)}, wild, tiny.mixture(), {}, tmp_path
            )
        assert [path.name for path in kept.iterdir()] == ["1"]
    calm = dataclasses.replace(wild, learning_rate=0.1)
    params, taken = loop.fit(square, begins, calm, tiny.mixture(), {}, tmp_path)
    assert taken == 8 and (np.abs(params["x"]) < np.abs(draws)).all()
    assert [line["step"] for line in log(tmp_path)] == [*range(1, 9)]
    assert sorted(path.name for path in kept.iterdir()) == ["7", "8"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be positive"),
        ({"steps": 2.5}, r"steps must be a whole number, not 2\.5"),
        ({"steps": True}, r"steps must be a whole number, not True"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, not nan"),
        ({"learning_rate": "x"}, "learning_rate must be a finite number, not 'x'"),
        ({"warmup_steps": 12}, r"warmup_steps \(12\) must be below steps \(12\)"),
        ({"microbatches": 3}, r"batch_size \(8\) must be a multiple of microbatches \(3\)"),
        ({"checkpoint_every": 5}, r"checkpoint_every \(5\) must be a multiple of log_every \(2\)"),
    ],
)
def test_bad_settings_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny.CONFIG, **changes)
