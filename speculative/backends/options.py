"""Options of XLA's compilers for programs of decoding and training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

READ_AHEAD: dict[str, str | bool] = {
    "xla_tpu_msa_tensor_overrides": "overrides { hlo_operand_filter { "
    'instruction_name_regex: "while.*" size_gte: 1000000 } keep_in_default_memory { } }',
    "xla_max_cross_program_prefetches": "0",
}
"""For a TPU: no kernel stays on the chip through a loop.

By default XLA fills most of a v4's 128 MiB on the chip with kernels that stay there from step to
step, and then has no room to read the others ahead. A guess of T5 v1.1 large for XXL would take 1.9
times as long, one of small 1.15 times, and an autoregressive step of XXL 1.05 times. Streamed steps
would begin by reading a large kernel that is only used after the draft's loop.
"""

LARGE = 2**30
"""Bytes of weights from which reading ahead pays off even without a draft: 8 times 128 MiB."""

WINDOWS: dict[str, str | bool] = {"xla_tpu_scoped_vmem_limit_kib": "49152"}
"""For a TPU v5e: more of its 128 MiB on the chip for an operation's operands, usually 16 MiB.

A product streams a kernel that is not read ahead, such as those of T5 11B's feed-forward layers, in
windows of that size. An int8 step of 11B then takes 0.85 times as long, but a bfloat16 step longer.
"""

TRAINING: dict[str, str | bool] = {
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    "xla_enable_async_all_gather": "true",
}
"""For a TPU: sharded kernels are gathered whole, while earlier products are still computed.

By default XLA turns such a product into a loop; each iteration takes one chip's part of the kernel
and reads and writes the whole sum. A feed-forward product of T5 v1.1 XXL on 16 chips of a v4 then
takes 4 times as long.
"""

V5E = "TPU v5 lite"  # JAX's name for it.

WIDE = 2**25
"""Bytes of an int8 kernel from which larger windows pay off: half of the smallest one of 11B."""

QUICK: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False}
"""For programs on a CPU: XLA's older emitter of loops, which compiles in about 0.7 of the time.

The code between our kernels runs as fast with it and gives the same bits, except for exponentials,
which a kernel of ours computes too.
"""


@functools.cache
def compiler_options(
    reads_ahead: bool, wide: bool = False, device: Any = None
) -> tuple[tuple[str, str | bool], ...]:
    """The options for a program on a device; by default the present one.

    It `reads_ahead` with a draft, or with weights of more than `LARGE` bytes, and is `wide` with
    int8 kernels of more than `WIDE`. There are none if the compiler does not know them: libtpu
    0.0.52 knows `READ_AHEAD`, 0.0.42 does not.
    """
    device = device or jax.devices()[0]
    of_tpu = (READ_AHEAD if reads_ahead else {}) | (
        WINDOWS if wide and device.device_kind == V5E else {}
    )
    return _known({"tpu": of_tpu, "cpu": QUICK}.get(device.platform, {}), device)


@functools.cache
def training_options(device: Any) -> tuple[tuple[str, str | bool], ...]:
    """The options for a step of training on a device."""
    return _known(TRAINING if device.platform == "tpu" else {}, device)


def _known(options: dict[str, str | bool], device: Any) -> tuple[tuple[str, str | bool], ...]:
    """The options, or none if the device's compiler does not know them."""
    small = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        if options:
            jax.jit(jnp.negative).lower(small).compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return ()
    return tuple(options.items())
