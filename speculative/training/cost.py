"""The cost of a run: operations per step, hours, chip-hours, memory."""

import dataclasses

import jax
from jax.sharding import Mesh

from speculative.measurement import chips
from speculative.measurement.chips import GIB
from speculative.models import Config, sharding
from speculative.training.loop import TrainConfig, state_shapes

SHARE = 0.4  # The share of the chips' peak that is assumed before anything is measured.


def operations(model: Config, config: TrainConfig) -> float:
    """Floating-point operations that a step needs; recomputed ones count once.

    A product of [m, k] and [k, n] has 2 m k n; the backward pass has twice those of the forward
    pass. Rows include their padding.
    """
    source, target, rows = config.source_length, config.target_length, config.batch_size
    width, wide = model.num_heads * model.head_dim, model.emb_dim
    products = 2 * wide * width  # Queries and outputs, per token.
    both = 2 * wide * model.kv_heads * model.head_dim  # Keys and values.
    feed_forward = (3 if model.gated else 2) * wide * model.mlp_dim
    crosses = model.encoder_layers > 0
    attended = 2 * width * target * (target + source * crosses)  # Scores, and weighted values.
    apart = crosses and not model.merges_source  # Queries and outputs of cross-attention.
    decoder = target * (products * (1 + apart) + both + feed_forward) + source * both * crosses
    encoder = source * (products + both + feed_forward) + 2 * width * source * source
    layers = model.encoder_layers * encoder + model.decoder_layers * (decoder + attended)
    return 3 * 2.0 * rows * (layers + target * wide * model.logits)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a run on the present devices."""

    model: Config
    config: TrainConfig
    on: Mesh | None

    @property
    def devices(self) -> int:
        """The number of devices that compute."""
        return self.on.size if self.on else 1

    @property
    def peak(self) -> float | None:
        """Operations per second of all devices; None if their peak is not published."""
        kind = jax.devices()[0].device_kind
        published = next((chip for chip in chips.CHIPS if chip.kind == kind), None)
        return published.peak * self.devices if published else None

    def state_bytes(self) -> int:
        """Bytes on each device: parameters, their gradient and the optimizer's state."""
        state, size = state_shapes(self.config, self.model, self.on), sharding.bytes_a_device
        return size(state) + size(state.params)

    def require_memory(self) -> None:
        """Raises ValueError unless the state fits the devices' memory."""
        name, there = chips.device_bytes()
        need = self.state_bytes()
        # A CPU's devices share its memory.
        here = jax.local_device_count() if self.on and jax.default_backend() == "cpu" else 1
        if need * here > there:
            over, enough = (need * here - there) / GIB, need * self.devices / (0.8 * there)
            rows = self.config.batch_size // self.config.microbatches
            fitting = next((n for n in range(1, rows + 1) if rows % n == 0 and n >= enough), None)
            more = f", or {fitting} such devices (--mesh=data:{fitting})" if fitting else ""
            raise ValueError(
                f"Parameters, gradient and moments need {need / GIB:.1f} GiB on each of "
                f"{self.devices} devices, {over:.1f} GiB more than {name} has; take a smaller "
                f"model or a machine with more{more}."
            )

    def expected(self) -> str:
        """A sentence about the cost, before the first step."""
        config, each = self.config, operations(self.model, self.config)
        text = (
            f"{config.steps:,} steps of {config.batch_size} rows of {config.source_length} + "
            f"{config.target_length} tokens: {each * config.steps:.2e} operations; state of "
            f"{self.state_bytes() / GIB:.2f} GiB per device"
        )
        if self.peak is None:
            return f"{text}. The first line of the log shows how long that takes here."
        hours = each * config.steps / (SHARE * self.peak) / 3600
        return (
            f"{text}. At {SHARE:.0%} of the peak of {self.devices} {jax.devices()[0].device_kind} "
            f"that is {hours:,.1f} hours, {hours * self.devices:,.1f} chip-hours."
        )

    def measured(self, seconds: float, left: int) -> dict[str, float]:
        """Numbers for the log, given the seconds per step and the number of steps left."""
        line = {"seconds_a_step": round(seconds, 4), "hours_left": round(seconds * left / 3600, 3)}
        if self.peak:
            each = operations(self.model, self.config)
            line["share_of_peak"] = round(each / (seconds * self.peak), 4)
        memory = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in memory:
            line["memory_gib"] = round(memory["peak_bytes_in_use"] / GIB, 3)
        return line
