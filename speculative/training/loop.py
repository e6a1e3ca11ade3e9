"""The training loop of every objective: steps, held-out loss, log, checkpoints, resuming.

On a mesh devices share parameters and moments (`sharding.of_training`), and each has its own rows
of a batch; JAX's partitioner derives the gathers and the exchanged sums from that.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from speculative import checks, disk
from speculative.backends import training_options
from speculative.models import Config, FlaxModel, abstract_params, model_of, sharding
from speculative.training import begun, saved
from speculative.training.data import Batch, Mixture
from speculative.training.together import agreed, by_first, is_first
from speculative.types import PAD_ID, PyTree

Metrics = dict[str, Array]
Objective = Callable[[PyTree, PyTree, Mapping[str, Array], Array | None], tuple[Array, Metrics]]
"""From (params, frozen, batch, dropout key) to the loss and the metrics, each summed over the
batch's target tokens. The frozen parameters, such as a teacher's, are used but not trained.
It is hashable: runs with equal objectives and settings share their compiled steps."""

CHECKPOINTS = "checkpoints"  # A folder in a run's folder.
UNFINISHED = 75  # Exit code of a command that stopped at its deadline; rerun to resume.
CHOICES = {
    "decay": ("cosine", "constant", "rsqrt"),
    "remat": ("none", "layers", "products"),
    "take": ("last", "best"),
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of a run, its learning rate and its batches."""

    steps: int  # Steps of the whole run.
    batch_size: int = 64  # Rows B of a batch.
    microbatches: int = 1  # Equal parts of a batch, computed in turn to save memory, and added up.
    source_length: int = 256  # Source tokens S of a row, which is filled with several examples.
    target_length: int = 160  # Target tokens L of a row.
    # The highest learning rate. Adafactor scales it by each parameter's own size, so 0.01 is a step
    # of 1% (T5's constant).
    learning_rate: float = 0.01
    # Steps in which the rate rises linearly; with "rsqrt" it is constant in them, as T5's is.
    warmup_steps: int = 1000
    # The rate after that: half a "cosine" down to 0, "constant", or T5's "rsqrt" of pre-training,
    # which falls with the square root of the step.
    decay: str = "cosine"
    clip_norm: float = 1.0  # The gradient's largest global norm; 0 sets no limit.
    # What the backward pass computes again, to save memory: "none", "layers" (all of each, from its
    # input) or "products" (all but products with kernels).
    remat: str = "none"
    seed: int = 0  # For the initial parameters, the examples' order and dropout.
    log_every: int = 50  # Steps between log lines; a run saves and stops only at such a step.
    evaluate_every: int = 1000  # Steps between held-out evaluations, a multiple of log_every.
    checkpoint_every: int = 1000  # Steps between checkpoints, a multiple of log_every.
    keep: int = 2  # Newest checkpoints that are kept, two or more, besides the best one.
    # The checkpoint that becomes the model: the "last", or the "best" in held-out evaluation.
    take: str = "last"
    patience: int = 0  # The run ends after this many evaluations without a better one; 0: never.

    def __post_init__(self) -> None:
        checks.fields(self)
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"TrainConfig.{name} must be one of {', '.join(known)}, not {value!r}."
                )
        may_be_0 = ("seed", "warmup_steps", "clip_norm", "patience")
        for name, value in vars(self).items():
            if isinstance(value, str):
                continue
            if value < 0:
                raise ValueError(f"TrainConfig.{name} cannot be {value!r}.")
            if value == 0 and name not in may_be_0:
                raise ValueError(f"TrainConfig.{name} must be positive.")
        if self.keep < 2:  # A fault may have begun in the newest one.
            raise ValueError(f"TrainConfig.keep must be at least 2, not {self.keep}.")
        warmup, steps = self.warmup_steps, self.steps
        if warmup >= steps and self.decay != "rsqrt":
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
        """The learning rate at a step, counted from 0."""
        rate, warmup = self.learning_rate, self.warmup_steps
        if self.decay == "rsqrt":
            least = max(1, warmup)
            return lambda step: rate * jnp.sqrt(least / jnp.maximum(step, least))
        after = optax.constant_schedule(rate)
        if self.decay == "cosine":
            after = optax.cosine_decay_schedule(rate, self.steps - warmup)
        rising = optax.linear_schedule(0.0, rate, max(1, warmup))
        return optax.join_schedules([rising, after], [warmup])

    def optimizer(self) -> optax.GradientTransformation:
        """Adafactor as in T5X (Shazeer and Stern, 2018), after clipping the gradient.

        Moments are factored where both axes have 128 numbers or more; updates are clipped at a root
        mean square of 1 and scaled by the parameter's own, at least 0.001. As with T5X's
        `step_offset`, moments start afresh in a run, whichever checkpoint it starts from.
        """
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()
        return optax.chain(clip, optax.adafactor(self.schedule()))

    def require_mesh(self, text: str) -> None:
        """ValueError unless the devices of a mesh can share the rows of each microbatch."""
        devices = checks.mesh("mesh", text)[sharding.DATA]
        rows = self.batch_size // self.microbatches
        if rows % devices:
            raise ValueError(
                f"The mesh {text} shares a batch among {devices} groups of devices, which "
                f"{rows} rows (TrainConfig.batch_size {self.batch_size} in {self.microbatches} "
                f"microbatches) do not divide into; take data:{math.gcd(rows, devices)}, other "
                "microbatches or another batch_size."
            )


@struct.dataclass
class TrainState:
    """The number of steps done, float32 parameters and the optimizer's state: a checkpoint."""

    step: Array
    params: PyTree
    optimizer: PyTree


class Trained(NamedTuple):
    """The result of a run."""

    params: PyTree  # The newest ones.
    taken: int | None  # The step of the checkpoint that becomes the model; None: not finished.


def begin(config: TrainConfig, params: PyTree) -> TrainState:
    """The state before the first step."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return TrainState(jnp.zeros((), jnp.int32), params, config.optimizer().init(params))


def state_shapes(config: TrainConfig, model: Config, on: Mesh | None) -> TrainState:
    """The shapes of a run's state and, on a mesh, their shardings."""
    params = abstract_params(model.replace(dtype="float32"))
    state = jax.eval_shape(functools.partial(begin, config), params)
    return state if on is None else sharding.laid_out(state, sharding.of_training(state, on))


def mean_gradient(
    objective: Objective,
    params: PyTree,
    frozen: PyTree,
    batch: Mapping[str, Array],
    dropout_key: Array,
    microbatches: int,
    on: Mesh | None = None,
) -> tuple[PyTree, Metrics]:
    """The gradient of the batch's mean loss per target token, and the metrics' sums."""
    tokens = jnp.maximum(batch["decoder_loss_weights"].sum(), 1)

    def mean(params: PyTree, part: dict[str, Array], key: Array) -> tuple[Array, Metrics]:
        loss, metrics = objective(params, frozen, part, key)
        return loss / tokens, metrics

    def add(total: PyTree, part: tuple[dict[str, Array], Array]) -> tuple[PyTree, Metrics]:
        gradient, metrics = jax.grad(mean, has_aux=True)(params, *part)
        return _along(jax.tree.map(jnp.add, total, gradient), on), metrics

    parts = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
    if on is not None:  # Devices share each microbatch.
        rows = NamedSharding(on, PartitionSpec(None, sharding.DATA))
        parts = jax.lax.with_sharding_constraint(parts, jax.tree.map(lambda _: rows, parts))
    keys = jax.random.split(dropout_key, microbatches)  # Each microbatch has its own.
    zeros = _along(jax.tree.map(jnp.zeros_like, params), on)
    gradient, metrics = jax.lax.scan(add, zeros, (parts, keys))
    return gradient, {name: x.sum(0) for name, x in metrics.items()}


def _along(tree: PyTree, on: Mesh | None) -> PyTree:
    """Lays out parameters, gradients or a state as in training on a mesh."""
    if on is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, sharding.of_training(tree, on))


@functools.cache
def program(device: Any) -> Any:
    """A jitted step, for a device that may be only described; see `_step`."""
    options = dict(training_options(device)) or None
    return jax.jit(_step, static_argnums=(0, 1, 5), donate_argnums=2, compiler_options=options)


@functools.cache
def _evaluation(device: Any) -> Any:
    """A jitted evaluation, for a device as in `program`; see `_evaluate`."""
    options = dict(training_options(device)) or None
    return jax.jit(_evaluate, static_argnums=0, compiler_options=options)


def _step(
    objective: Objective,
    config: TrainConfig,
    state: TrainState,
    frozen: PyTree,
    batch: dict[str, Array],
    on: Mesh | None = None,
) -> tuple[TrainState, Metrics, Array]:
    """The state after a step, the metrics' sums, and the gradient's global norm."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    inputs = objective, state.params, frozen, batch, key, config.microbatches, on
    gradient, metrics = mean_gradient(*inputs)
    norm = optax.tree.norm(gradient)
    updates, moments = config.optimizer().update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    after = _along(TrainState(state.step + 1, params, moments), on)
    return after, _with_counts(metrics, batch), norm


def _evaluate(
    objective: Objective, params: PyTree, frozen: PyTree, batch: dict[str, Array]
) -> Metrics:
    return _with_counts(objective(params, frozen, batch, None)[1], batch)


@jax.jit
def _finite(state: TrainState) -> Array:
    """Whether all numbers of a checkpoint are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


def in_training(model: Config, remat: str, on: Mesh | None, start_id: int = PAD_ID) -> FlaxModel:
    """A model to train, whose devices share batches; see `sharding.InTraining`."""
    backend = sharding.InTraining(remat=remat, on=on)
    return dataclasses.replace(model_of(model, start_id), backend=backend)


def own_rows(on: Mesh | None, count: int) -> np.ndarray:
    """The rows, out of `count` in a batch, that this process's devices have."""
    if on is None:
        return np.arange(count)
    rows = NamedSharding(on, PartitionSpec(sharding.DATA))
    parts = rows.addressable_devices_indices_map((count,)).values()
    return np.unique(np.concatenate([np.arange(count)[part] for part in parts]))


def put(batch: Batch, on: Mesh | None, count: int, rows: np.ndarray) -> dict[str, Any]:
    """A batch of `count` rows on a mesh's devices; `batch` has this process's `rows`."""
    if on is None:
        return dict(batch)
    where = NamedSharding(on, PartitionSpec(sharding.DATA))

    def array(x: np.ndarray) -> Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return x[np.searchsorted(rows, np.arange(count)[index[0]])]

        return jax.make_array_from_callback((count, *x.shape[1:]), where, part)

    return {name: array(x) for name, x in batch.items()}


class Log:
    """The log in a run's folder: a line of named numbers every few steps."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.file = folder / "log.jsonl"

    def lines(self) -> list[dict[str, float]]:
        """All lines; none without a log."""
        return disk.entries(self.file, lambda line: line | {"step": int(line["step"])}, "log line")

    def until(self, step: int) -> None:
        """Removes the lines after a step, because their steps are done again."""
        kept = (json.dumps(line) for line in self.lines() if line["step"] <= step)
        disk.write(self.file, "".join(f"{line}\n" for line in kept))

    def ended(self, config: TrainConfig) -> bool:
        """Whether the run has ended."""
        lines = self.lines()
        last = lines[-1]["step"] if lines else 0
        return last >= config.steps or self.impatient(config)

    def impatient(self, config: TrainConfig) -> bool:
        """Whether the last `config.patience` evaluations did not improve on the best one."""
        scores = [line["score"] for line in self.lines() if "score" in line]
        if not config.patience or not scores:
            return False
        return int(np.argmax(scores[::-1])) >= config.patience  # Among equals the last is best.


def fit(
    objective: Objective,
    start: Callable[[], PyTree],
    config: TrainConfig,
    train: Mixture,
    held_out: Mapping[str, Sequence[Batch]],
    folder: disk.Path,
    frozen: PyTree = (),
    deadline: float = math.inf,
    on: Mesh | None = None,
    score: Callable[[PyTree], Mapping[str, float]] | None = None,
    measured: Callable[[float, int], Mapping[str, float]] = lambda seconds, left: {},
    checkpoint_dir: disk.Path | None = None,
    on_evaluation: Callable[[pathlib.Path], object] = lambda folder: None,
) -> Trained:
    """Trains from the folder's newest checkpoint, or else from the parameters that `start` gives.

    The folder gets `log.jsonl` and, unless they go into a `checkpoint_dir`, which may be
    ``gs://bucket/folder``, the `checkpoints/`. Log lines hold the step, the mean loss and metrics
    since the previous line, the gradient's norm, the learning rate, seconds, tokens per second, the
    numbers that `measured` returns for the seconds per step and the steps left, and the means over
    the `held_out` batches of each name, evaluated without dropout. `score` may judge parameters by
    other numbers, where higher is better. Their mean, or without them the negated mean held-out
    loss, is an evaluation's `score`, which determines the best checkpoint. Then `on_evaluation` is
    called with the folder, to show its log.

    A resumed run uses the same batches and dropout masks as one that never stopped, on the same
    devices or others. After `deadline`, a `time.monotonic()` in seconds, the run saves and stops.
    If there are several processes, they share the checkpoints' folder; each has its own devices'
    rows of a batch and writes their parts of checkpoints, and the first one writes the log.

    Raises ValueError if the loss or the parameters stop being finite, or if another process trains
    in the folder; OSError if a checkpoint cannot be written. Such parameters are never saved, and
    the two newest checkpoints are kept: if the fault immediately follows the newest one, it had
    begun there, and the run resumes from the older one.
    """
    folder, first = pathlib.Path(folder).absolute(), is_first()
    log, whole = Log(folder), {n: _whole(part, on) for n, part in held_out.items()}
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    with contextlib.ExitStack() as stack:
        by_first(lambda: stack.enter_context(disk.owned(folder)))
        kept = saved.Checkpoints(checkpoint_dir or folder / CHECKPOINTS, config.keep)
        checkpoints = stack.enter_context(kept)
        progress = stack.enter_context(Progress(*columns, disable=not first))
        if (newest := checkpoints.newest()) is None:
            state = begin(config, start())
            # Commit it to a device, as a restored one is: a resumed run compiles the same step.
            state = jax.device_put(state, sharding.places(state, on))
        else:
            made = functools.partial(begin, config)
            state = checkpoints.restored(newest, lambda params: jax.eval_shape(made, params), on)
        begun_at = int(state.step)
        by_first(lambda: log.until(begun_at))
        bar = progress.add_task("", total=config.steps, completed=begun_at)
        step, evaluate = (make(jax.local_devices()[0]) for make in (program, _evaluation))
        rows = own_rows(on, config.batch_size)
        batches = train.batches(config.seed, begun_at, rows)
        learning_rate = jax.jit(config.schedule())
        window, since = list[tuple[Metrics, Array]](), time.monotonic()
        over = begun_at > 0 and agreed(first and log.ended(config))
        for done in range(begun_at + 1, begun_at + 1 if over else config.steps + 1):
            batch = put(next(batches), on, config.batch_size, rows)
            state, metrics, norm = step(objective, config, state, frozen, batch, on)
            window.append((metrics, norm))
            last = done == config.steps
            if done % config.log_every and not last:
                continue
            line = {"step": done} | _means([metrics for metrics, _ in window])
            if not math.isfinite(line["loss"]):
                raise _overflow(f"The loss is {line['loss']}", done, config, folder, checkpoints)
            line["gradient_norm"] = float(np.mean(jax.device_get([norm for _, norm in window])))
            line["learning_rate"] = float(learning_rate(done - 1))
            seconds = time.monotonic() - since
            line["tokens_per_second"] = round(line.pop("tokens") / seconds)
            line["seconds"] = round(seconds, 3)
            line |= measured(seconds / len(window), config.steps - done)
            evaluated = last or done % config.evaluate_every == 0
            if evaluated:
                for name, batches_of in whole.items():
                    of = _means([evaluate(objective, state.params, frozen, b) for b in batches_of])
                    line |= {f"{name}/{key}": of[key] for key in of if key != "tokens"}
                judged = dict(score(state.params)) if score else {}
                line |= judged
                judged = judged or {n: -line[f"{n}/loss"] for n in whole}
                if judged:
                    line["score"] = sum(judged.values()) / len(judged)
                text = (f"{k} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in line.items())
                progress.console.print("  ".join(text), highlight=False)
            stop = agreed(time.monotonic() > deadline)
            saves = last or stop or evaluated or done % config.checkpoint_every == 0
            if saves and not _finite(state):
                raise _overflow("Parameters are not finite", done, config, folder, checkpoints)
            by_first(functools.partial(disk.append, log.file, line))
            if evaluated and first:
                on_evaluation(folder)
            progress.update(bar, completed=done, description=f"loss {line['loss']:.3f}")
            if saves:
                checkpoints.save(done, state, line.get("score"))
            if stop or (evaluated and agreed(first and log.impatient(config))):
                break
            window, since = [], time.monotonic()
        checkpoints.finish()
        ended = int(state.step) >= config.steps or agreed(first and log.ended(config))
        taken = checkpoints.best() if config.take == "best" else checkpoints.newest()
    return Trained(state.params, taken if ended else None)


def _whole(batches: Sequence[Batch], on: Mesh | None) -> list[dict[str, Any]]:
    """Batches on a mesh's devices; every process has all of their rows."""
    counts = [len(batch["decoder_loss_weights"]) for batch in batches]
    both = zip(batches, counts, strict=True)
    return [put(batch, on, count, np.arange(count)) for batch, count in both]


def _overflow(
    fault: str,
    step: int,
    config: TrainConfig,
    folder: pathlib.Path,
    checkpoints: saved.Checkpoints,
) -> ValueError:
    """The error of a run that is no longer finite, which may now resume at a lower rate.

    The newest checkpoint is removed if no log line came between it and the fault.
    """
    checkpoints.finish()
    newest = checkpoints.newest()
    if newest is not None and step - newest <= config.log_every:
        checkpoints.remove(newest)
    if is_first():
        begun.allow_another_rate(folder)
    from_step = checkpoints.newest()
    where = f"resumes from its checkpoint of step {from_step}" if from_step else "starts anew"
    return ValueError(
        f"{fault} at step {step} of {folder}; lower {begun.RATE} and run the same "
        f"command again, which {where}."
    )


def deadline_after(minutes: float | None) -> float:
    """The `time.monotonic()` at which a run of this many minutes stops; None sets no limit."""
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
