"""The training loop, one for every objective: steps, held-out loss, log, checkpoints, resume."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from jax import Array

from speculative.training.data import Batch, Mixture
from speculative.training.log import Log, brief, means, progress_bar
from speculative.types import PyTree

Metrics = dict[str, Array]


class Objective(Protocol):
    """What a run minimises."""

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Mapping[str, Array], dropout_key: Array | None
    ) -> tuple[Array, Metrics]:
        """The loss and the metrics, each summed over the batch's target tokens.

        `frozen` are parameters that are used and not trained: a teacher's.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how fast and on what batches.

    Attributes:
        steps: of the whole run.
        batch_size: B rows.
        microbatches: equal parts of a batch that are computed one after the other, where the
            whole has no room in memory; their gradients add up to the batch's.
        source_length: S tokens a row, filled with several examples.
        target_length: L tokens a row.
        learning_rate: the peak. Adafactor scales it by each parameter's own size, so 0.01 is
            a step of 1% (T5's constant).
        warmup_steps: of linear warm-up to the peak; a cosine follows.
        final_share: of the peak, at which the cosine ends; 1 stays at the peak.
        clip_norm: the gradient's largest global norm.
        seed: of initialisation, order and dropout.
        log_every: steps between log lines; checkpoints and stops fall on them.
        evaluate_every: steps between held-out evaluations, a multiple of log_every.
        checkpoint_every: steps between checkpoints, a multiple of log_every.
    """

    steps: int
    batch_size: int = 64
    microbatches: int = 1
    source_length: int = 256
    target_length: int = 160
    learning_rate: float = 0.01
    warmup_steps: int = 1000
    final_share: float = 0.0
    clip_norm: float = 1.0
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 1000
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type in (int, "int")
            if (whole and not isinstance(value, int)) or value < 0 or not math.isfinite(value):
                raise ValueError(f"TrainConfig.{field.name} cannot be {value!r}.")
            if value == 0 and field.name not in ("seed", "warmup_steps", "final_share"):
                raise ValueError(f"TrainConfig.{field.name} must be positive.")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"TrainConfig.warmup_steps ({self.warmup_steps}) must be below steps "
                f"({self.steps})."
            )
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"TrainConfig.batch_size ({self.batch_size}) must be a multiple of microbatches "
                f"({self.microbatches})."
            )
        for name in ("evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.log_every:
                raise ValueError(
                    f"TrainConfig.{name} ({getattr(self, name)}) must be a multiple of "
                    f"log_every ({self.log_every})."
                )

    def schedule(self) -> optax.Schedule:
        """The learning rate at a step."""
        return optax.warmup_cosine_decay_schedule(
            0.0,
            self.learning_rate,
            self.warmup_steps,
            self.steps,
            end_value=self.final_share * self.learning_rate,
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Adafactor as T5 uses it (Shazeer and Stern, 2018), behind a clipped gradient."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm), optax.adafactor(self.schedule())
        )


@struct.dataclass
class TrainState:
    """All that a step reads and changes; a checkpoint holds exactly this.

    Attributes:
        step: steps done.
        params: the model's parameters, float32.
        optimizer: the optimizer's state.
    """

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
    """The gradient of the batch's mean loss a target token, and its metrics, summed.

    Args:
        objective: the loss.
        params: where the gradient is taken.
        frozen: see `Objective`.
        batch: B rows.
        dropout_key: of all masks.
        microbatches: see `TrainConfig`; a divisor of B.
    """
    tokens = jnp.maximum(batch["decoder_loss_weights"].sum(), 1)

    def mean(params: PyTree, part: dict[str, Array], key: Array) -> tuple[Array, Metrics]:
        loss, metrics = objective(params, frozen, part, key)
        return loss / tokens, metrics

    def add(total: PyTree, part: tuple[dict[str, Array], Array]) -> tuple[PyTree, Metrics]:
        gradient, metrics = jax.grad(mean, has_aux=True)(params, *part)
        return jax.tree.map(jnp.add, total, gradient), metrics

    parts = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
    keys = jax.random.split(dropout_key, microbatches)
    zeros = jax.tree.map(jnp.zeros_like, params)
    gradient, metrics = jax.lax.scan(add, zeros, (parts, keys))
    return gradient, {name: x.sum(0) for name, x in metrics.items()}


def fit(
    objective: Objective,
    params: PyTree,
    config: TrainConfig,
    train: Mixture,
    held_out: Mapping[str, Sequence[Batch]],
    folder: str | pathlib.Path,
    frozen: PyTree = (),
    deadline: float | None = None,
) -> tuple[PyTree, bool]:
    """Trains from the folder's newest checkpoint, or from `params` where there is none.

    The folder gets `checkpoints/` and `log.jsonl`: step, mean loss and metrics since the line
    before, learning rate, tokens a second, and held-out means where they were taken. A resumed
    run takes the batches and dropout masks that the uninterrupted one would have taken.

    Args:
        objective: the loss.
        params: initial parameters.
        config: see `TrainConfig`.
        train: training batches.
        held_out: batches by name, evaluated without dropout.
        folder: where the run lives.
        frozen: parameters that the objective only reads.
        deadline: `time.monotonic()` seconds after which the run saves and stops.

    Returns:
        The parameters, and whether the run is finished (False: stopped at the deadline).

    Raises:
        ValueError: the loss stopped being finite.
    """
    folder = pathlib.Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = config.optimizer()

    def step(state: TrainState, frozen: PyTree, batch: dict[str, Array]):
        # "rbg" keys make dropout masks several times faster than the default generator's.
        key = jax.random.fold_in(jax.random.key(config.seed, impl="rbg"), state.step)
        gradient, metrics = mean_gradient(
            objective, state.params, frozen, batch, key, config.microbatches
        )
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, moments), _with_counts(metrics, batch)

    def evaluate(params: PyTree, frozen: PyTree, batch: dict[str, Array]) -> Metrics:
        return _with_counts(objective(params, frozen, batch, None)[1], batch)

    train_step = jax.jit(step, donate_argnums=0)
    evaluate_step = jax.jit(evaluate)
    # A copy, because the step donates its state and the caller's parameters must survive.
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with (
        ocp.CheckpointManager(folder / "checkpoints", options=options) as manager,
        progress_bar() as progress,
    ):
        if (newest := manager.latest_step()) is not None:
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
            )
            state = manager.restore(newest, args=ocp.args.StandardRestore(abstract))
        done = int(state.step)
        log = Log(folder / "log.jsonl", done)
        bar = progress.add_task("", total=config.steps, completed=done)
        batches = train.batches(config.seed, done)
        window: list[Metrics] = []
        since = time.monotonic()
        while done < config.steps:
            state, metrics = train_step(state, frozen, next(batches))
            window.append(metrics)
            done += 1
            last = done == config.steps
            if done % config.log_every and not last:
                continue
            line = {"step": done} | means(window)
            if not math.isfinite(line["loss"]):
                raise ValueError(
                    f"The loss is {line['loss']} at step {done} of {folder}; lower "
                    "TrainConfig.learning_rate and start again from the last checkpoint."
                )
            line["learning_rate"] = float(np.asarray(config.schedule()(done - 1)))
            line["tokens_per_second"] = round(line.pop("tokens") / (time.monotonic() - since))
            if last or done % config.evaluate_every == 0:
                for name, batches_of in held_out.items():
                    of = means([evaluate_step(state.params, frozen, b) for b in batches_of])
                    line |= {f"{name}/{key}": of[key] for key in of if key != "tokens"}
                progress.console.print(brief(line), highlight=False)
            log.write(line)
            progress.update(bar, completed=done, description=f"loss {line['loss']:.3f}")
            stop = deadline is not None and time.monotonic() > deadline
            if last or stop or done % config.checkpoint_every == 0:
                manager.save(done, args=ocp.args.StandardSave(state))
            if stop:
                break
            window = []
            since = time.monotonic()
    return state.params, done >= config.steps


def _with_counts(metrics: Metrics, batch: Mapping[str, Array]) -> Metrics:
    target_tokens = batch["decoder_loss_weights"].sum()
    return metrics | {
        "weight": target_tokens,
        "tokens": target_tokens + (batch["encoder_segment_ids"] > 0).sum(),
    }
