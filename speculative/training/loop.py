"""The training loop of every objective: steps, held-out loss, log, checkpoints, resuming."""

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from jax import Array
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from speculative import checks, disk
from speculative.training import begun
from speculative.training.data import Batch, Mixture
from speculative.types import PyTree

Metrics = dict[str, Array]
Objective = Callable[[PyTree, PyTree, Mapping[str, Array], Array | None], tuple[Array, Metrics]]
"""From (params, frozen, batch, dropout key) to the loss and the metrics, each summed over the
batch's target tokens. The frozen parameters, such as a teacher's, are used but not trained.
It is hashable: runs of equal objectives and settings share their compiled steps."""

UNFINISHED = 75  # Exit code of a command that stopped at its deadline; the same command goes on.


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of a run, its learning rate and its batches."""

    steps: int  # Of the whole run.
    batch_size: int = 64  # Rows B.
    microbatches: int = 1  # Equal parts of a batch, computed in turn to save memory, and added up.
    source_length: int = 256  # Tokens S of a row, which is filled with several examples.
    target_length: int = 160  # Tokens L of a row.
    # The highest learning rate. Adafactor scales it by each parameter's own size, so 0.01 is a step
    # of 1% (T5's constant).
    learning_rate: float = 0.01
    warmup_steps: int = 1000  # Steps in which the rate rises linearly; a cosine follows.
    final_share: float = 0.0  # The last rate as a share of the highest; at 1 the rate is constant.
    clip_norm: float = 1.0  # The gradient's largest global norm.
    seed: int = 0  # Of the initial parameters, of the examples' order and of dropout.
    log_every: int = 50  # Steps between log lines; a run saves and stops only at such a step.
    evaluate_every: int = 1000  # Steps between held-out evaluations, a multiple of log_every.
    checkpoint_every: int = 1000  # Steps between checkpoints, a multiple of log_every.

    def __post_init__(self) -> None:
        checks.fields(self)
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"TrainConfig.{name} cannot be {value!r}.")
            if value == 0 and name not in ("seed", "warmup_steps", "final_share"):
                raise ValueError(f"TrainConfig.{name} must be positive.")
        warmup, steps = self.warmup_steps, self.steps
        if warmup >= steps:
            raise ValueError(f"TrainConfig.warmup_steps ({warmup}) must be below steps ({steps}).")
        for name, of in (
            ("batch_size", "microbatches"),
            ("evaluate_every", "log_every"),
            ("checkpoint_every", "log_every"),
        ):
            value, divisor = getattr(self, name), getattr(self, of)
            if value % divisor:
                raise ValueError(
                    f"TrainConfig.{name} ({value}) must be a multiple of {of} ({divisor})."
                )

    def schedule(self) -> optax.Schedule:
        """The learning rate at a step."""
        rate, last = self.learning_rate, self.final_share * self.learning_rate
        return optax.warmup_cosine_decay_schedule(0.0, rate, self.warmup_steps, self.steps, last)

    def optimizer(self) -> optax.GradientTransformation:
        """Adafactor as T5 uses it (Shazeer and Stern, 2018), behind a clipped gradient."""
        clip = optax.clip_by_global_norm(self.clip_norm)
        return optax.chain(clip, optax.adafactor(self.schedule()))


@struct.dataclass
class TrainState:
    """The number of steps done, float32 parameters and the optimizer's state: a checkpoint."""

    step: Array
    params: PyTree
    optimizer: PyTree


def mean_gradient(
    objective: Objective,
    params: PyTree,
    frozen: PyTree,
    batch: Mapping[str, Array],
    dropout_key: Array,
    microbatches: int,
) -> tuple[PyTree, Metrics]:
    """The gradient of the batch's mean loss per target token, and the metrics' sums."""
    tokens = jnp.maximum(batch["decoder_loss_weights"].sum(), 1)

    def mean(params: PyTree, part: dict[str, Array], key: Array) -> tuple[Array, Metrics]:
        loss, metrics = objective(params, frozen, part, key)
        return loss / tokens, metrics

    def add(total: PyTree, part: tuple[dict[str, Array], Array]) -> tuple[PyTree, Metrics]:
        gradient, metrics = jax.grad(mean, has_aux=True)(params, *part)
        return jax.tree.map(jnp.add, total, gradient), metrics

    parts = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
    keys = jax.random.split(dropout_key, microbatches)  # Each microbatch has its own.
    gradient, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (parts, keys))
    return gradient, {name: x.sum(0) for name, x in metrics.items()}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(
    objective: Objective,
    config: TrainConfig,
    state: TrainState,
    frozen: PyTree,
    batch: dict[str, Array],
) -> tuple[TrainState, Metrics]:
    # Dropout masks from "rbg" keys are made several times faster than by default.
    key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), state.step)
    given = objective, state.params, frozen, batch, key, config.microbatches
    gradient, metrics = mean_gradient(*given)
    updates, moments = config.optimizer().update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, moments), _with_counts(metrics, batch)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(
    objective: Objective, params: PyTree, frozen: PyTree, batch: dict[str, Array]
) -> Metrics:
    return _with_counts(objective(params, frozen, batch, None)[1], batch)


@jax.jit
def _finite(state: TrainState) -> Array:
    """Whether all numbers of a checkpoint are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


def last_step(folder: pathlib.Path) -> int:
    """The last step in the log of a run's folder; 0 without one."""
    lines = disk.entries(folder / "log.jsonl", lambda line: int(line["step"]), "line of a log")
    return lines[-1] if lines else 0


def fit(
    objective: Objective,
    params: PyTree,
    config: TrainConfig,
    train: Mixture,
    held_out: Mapping[str, Sequence[Batch]],
    folder: disk.Path,
    frozen: PyTree = (),
    deadline: float = math.inf,
) -> tuple[PyTree, bool]:
    """Trains from the folder's newest checkpoint, or else from `params`.

    The folder gets `checkpoints/` and `log.jsonl`, whose lines hold the step, the mean loss and
    metrics since the line before, the learning rate, seconds and tokens a second, and the means
    over the `held_out` batches of each name, evaluated without dropout. A resumed run uses the same
    batches and dropout masks as one that never stopped. After `deadline`, a `time.monotonic()` in
    seconds, the run saves and stops. Returns the parameters, and whether the run is finished.
    Raises ValueError if the loss or the parameters stop being finite, or if another process trains
    in the folder. Such parameters are never saved, and the two newest checkpoints are kept: where
    the fault follows the newest at once, it had begun in there, and the older one is gone on with.
    """
    folder = pathlib.Path(folder).absolute()
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    state = TrainState(jnp.zeros((), jnp.int32), params, config.optimizer().init(params))
    del params  # These are copies, which the first step donates.
    # Committed to a device, as a restored checkpoint is: a resumed run compiles the same step.
    state = jax.device_put(state, jax.local_devices()[0])
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    with (
        disk.owned(folder),
        ocp.CheckpointManager(folder / "checkpoints", options=options) as manager,
        Progress(*columns) as progress,
    ):
        if (newest := manager.latest_step()) is not None:
            state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        begun, log = int(state.step), folder / "log.jsonl"
        # Lines after the last checkpoint are of steps that are done again.
        lines = disk.entries(log, lambda line: (line["step"], json.dumps(line)), "line of a log")
        disk.write(log, "".join(f"{line}\n" for step, line in lines if step <= begun))
        bar = progress.add_task("", total=config.steps, completed=begun)
        batches = train.batches(config.seed, begun)
        learning_rate = jax.jit(config.schedule())
        window, since = list[Metrics](), time.monotonic()
        for done in range(begun + 1, config.steps + 1):
            state, metrics = _step(objective, config, state, frozen, next(batches))
            window.append(metrics)
            last = done == config.steps
            if done % config.log_every and not last:
                continue
            line = {"step": done} | _means(window)
            if not math.isfinite(line["loss"]):
                raise _overflow(f"The loss is {line['loss']}", done, config, manager, folder)
            line["learning_rate"] = float(learning_rate(done - 1))
            seconds = time.monotonic() - since
            line["tokens_per_second"] = round(line.pop("tokens") / seconds)
            line["seconds"] = round(seconds, 3)
            if last or done % config.evaluate_every == 0:
                for name, batches_of in held_out.items():
                    of = _means([_evaluate(objective, state.params, frozen, b) for b in batches_of])
                    line |= {f"{name}/{key}": of[key] for key in of if key != "tokens"}
                said = (f"{k} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in line.items())
                progress.console.print("  ".join(said), highlight=False)
            stop = time.monotonic() > deadline
            saves = last or stop or done % config.checkpoint_every == 0
            if saves and not _finite(state):
                raise _overflow("Parameters are not finite", done, config, manager, folder)
            disk.append(log, line)
            progress.update(bar, completed=done, description=f"loss {line['loss']:.3f}")
            if saves:
                manager.save(done, args=ocp.args.StandardSave(state))
            if stop:
                break
            window, since = [], time.monotonic()
    return state.params, int(state.step) >= config.steps


def _overflow(
    fault: str,
    step: int,
    config: TrainConfig,
    manager: ocp.CheckpointManager,
    folder: pathlib.Path,
) -> ValueError:
    """The error of a run that is finite no more, whose folder may be gone on with at a lower rate.

    The newest checkpoint is removed if no line of the log came between it and the fault.
    """
    manager.wait_until_finished()
    newest = manager.latest_step()
    if newest is not None and step - newest <= config.log_every:
        manager.delete(newest)
    begun.allow_another_rate(folder)
    from_step = manager.latest_step()
    where = f"from its checkpoint of step {from_step}" if from_step else "from the beginning"
    return ValueError(
        f"{fault} at step {step} of {folder}; lower {begun.RATE} and run the same command again, "
        f"which goes on {where}."
    )


def deadline_after(minutes: float | None) -> float:
    """The `time.monotonic()` at which a run stops that may take so long; None sets no limit."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def _means(window: Sequence[Metrics]) -> dict[str, float]:
    """The metrics of several steps as means over target tokens; `tokens` stays a sum."""
    window = jax.device_get(window)
    sums = {key: float(np.sum([m[key] for m in window], dtype=np.float64)) for key in window[0]}
    weight = max(sums.pop("weight"), 1.0)
    return {key: value if key == "tokens" else value / weight for key, value in sums.items()}


def _with_counts(metrics: Metrics, batch: Mapping[str, Array]) -> Metrics:
    targets, sources = batch["decoder_loss_weights"].sum(), batch["encoder_segment_ids"] > 0
    return metrics | {"weight": targets, "tokens": targets + sources.sum()}
