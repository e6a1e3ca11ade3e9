"""Compiles a training run for chips that need not be present: memory, time, share of the peak.

The program is the very step that a run dispatches (`training.loop.program`). Its time follows from
the TPU compiler's estimates and the chips' links (`measurement.schedule`); only chips can show how
long it takes.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speculative import checks
from speculative.measurement import chips
from speculative.measurement.chips import Chip
from speculative.measurement.hlo import HloModule
from speculative.measurement.schedule import Cost, Schedule
from speculative.models import Config, abstract_params, sharding
from speculative.progress import OnProgress
from speculative.studies.compiled import DoesNotFit, beside_arguments, explained
from speculative.training import loop
from speculative.training.cost import operations
from speculative.training.train import CrossEntropy

MODEL_PARTS = (1, 2, 4, 8)  # Parts of the model in the meshes that are tried.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingEstimate:
    """A run's TPU compiler estimates, as `speculative compile --json` prints them.

    None marks values that were not compiled because the run does not fit.
    """

    config: str
    parameters: int
    topology: str
    device_kind: str
    mesh: str
    chips: int
    dtype: str
    remat: str
    batch_size: int
    microbatches: int
    source_length: int
    target_length: int
    fits: bool
    hbm_bytes_per_chip: int  # Parameters, moments, gradient and activations.
    hbm_limit: int
    steps: int
    operations: float  # Per step; those repeated for the gradient count once.
    peak_flops_per_chip: float  # Published, for products in bfloat16.
    ms_step: float | None = None
    share_of_peak: float | None = None
    ms_collectives: float | None = None  # Including those in the background, which cost less.
    collectives: int | None = None
    collective_bytes: int | None = None
    hours: float | None = None  # All steps, without evaluation, checkpoints and compilation.
    chip_hours: float | None = None
    seconds_to_compile: float | None = None
    jax_version: str = jax.__version__
    libtpu_version: str | None = None
    fault: str | None = None  # The reason why it does not fit, and remedies.


def meshes(topology: str, config: loop.TrainConfig) -> list[str]:
    """The meshes to try if none is named: all chips, by the number of parts of the model."""
    count, names = len(chips.devices(topology)), list[str]()
    rows = config.batch_size // config.microbatches
    for parts in MODEL_PARTS:
        if count % parts == 0 and rows % (count // parts) == 0:
            names.append(f"{sharding.DATA}:{count // parts},{sharding.MODEL}:{parts}")
    if not names:
        raise ValueError(
            f"No mesh of the {count} chips of {topology} divides the {rows} rows of a microbatch; "
            "take another batch_size (TrainConfig.batch_size), or name a mesh (--mesh)."
        )
    return names


def estimate(
    name: str,
    model: Config,
    config: loop.TrainConfig,
    topology: str,
    mesh: str,
    label_smoothing: float = 0.0,
    z_loss: float = 1e-4,
    on_progress: OnProgress = lambda what, share: None,
) -> TrainingEstimate:
    """Compiles a run's step for a mesh; ValueError if the mesh does not fit batch or chips.

    T5 v1.1 XXL takes some ten minutes, and 16 GiB of this machine's memory.
    """
    config.require_mesh(mesh)
    checks.jax_settings()
    chip, described = chips.chip(topology), chips.devices(topology)
    on, began = sharding.mesh(mesh, described), time.perf_counter()
    whole = abstract_params(model.replace(dtype="float32"))
    each = operations(model, config)
    known: dict[str, Any] = {
        "config": name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(whole)),
        "topology": topology,
        "device_kind": chip.kind,
        "mesh": mesh,
        "chips": on.size,
        "dtype": model.dtype,
        "remat": config.remat,
        "batch_size": config.batch_size,
        "microbatches": config.microbatches,
        "source_length": config.source_length,
        "target_length": config.target_length,
        "hbm_limit": chip.hbm,
        "steps": config.steps,
        "operations": each,
        "peak_flops_per_chip": chip.peak,
        "libtpu_version": chips.compiler_version(),
    }
    what = f"{name} on {mesh}"
    objective = CrossEntropy(loop.in_training(model, config.remat, on), label_smoothing, z_loss)
    on_progress("compiling", 0)
    try:
        state = sharding.bytes_a_device(loop.state_shapes(config, model, on))
        if state > chip.hbm:
            raise DoesNotFit(state, chip, what, on.size)
        hbm, cost = _compiled(objective, config, on, chip, described[0], what)
        if hbm > chip.hbm:
            raise DoesNotFit(hbm, chip, what, on.size)
    except DoesNotFit as error:
        known["hbm_bytes_per_chip"] = error.need
        return TrainingEstimate(**known, fits=False, fault=_instead(error, config))
    hours = cost.seconds * config.steps / 3600
    return TrainingEstimate(
        **known,
        fits=True,
        hbm_bytes_per_chip=hbm,
        ms_step=1e3 * cost.seconds,
        share_of_peak=each / (cost.seconds * chip.peak * on.size),
        ms_collectives=1e3 * cost.exchanging,
        collectives=cost.collectives,
        collective_bytes=cost.exchanged,
        hours=hours,
        chip_hours=hours * on.size,
        seconds_to_compile=time.perf_counter() - began,
    )


def best(found: Sequence[TrainingEstimate]) -> TrainingEstimate | None:
    """The fastest estimate that fits, if any."""
    fitting = [one for one in found if one.ms_step is not None]
    return min(fitting, key=lambda one: one.ms_step or 0.0, default=None)


def _compiled(
    objective: CrossEntropy,
    config: loop.TrainConfig,
    on: Mesh,
    chip: Chip,
    device: Any,
    what: str,
) -> tuple[int, Cost]:
    """The bytes per chip that a step needs, and its cost."""
    rows = NamedSharding(on, PartitionSpec(sharding.DATA))

    def tokens(length: int) -> Any:
        shape = config.batch_size, length
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

    sides = {"encoder": config.source_length, "decoder": config.target_length}
    batch = {
        f"{side}_{field}": tokens(length)
        for side, length in sides.items()
        for field in ("input_tokens", "segment_ids")
    }
    for field in ("decoder_target_tokens", "decoder_loss_weights"):
        batch[field] = tokens(config.target_length)
    state = loop.state_shapes(config, objective.model.config, on)
    arguments = objective, config, state, (), batch, on
    try:
        compiled = loop.program(device).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        raise explained(error, chip, what) from error
    memory, module = compiled.memory_analysis(), HloModule(compiled.as_text())
    hbm = memory.argument_size_in_bytes + beside_arguments(memory)
    return hbm, Schedule(module, chip).cost(module.entry)


def _instead(error: DoesNotFit, config: loop.TrainConfig) -> str:
    """The error, with settings that take less memory."""
    more = [f"more microbatches than {config.microbatches}"]
    if config.remat != "layers":
        more.insert(0, "TrainConfig.remat = 'layers'")
    return f"{error.over} Take {', '.join(more)}, or more chips."
