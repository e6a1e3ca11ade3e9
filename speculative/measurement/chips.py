"""TPU chips for which programs can be compiled without one: memory, bandwidth, clock, sources.

Bandwidth and peak are those of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, v5e,
v5p and v6e). The memory is what the compiler lets a program use: somewhat less than the chip has.
The clock follows from the peak and from the products that the matrix units begin in a cycle; that
of v6e is the least certain, for it is documented with half the units that its peak takes.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
from typing import Any, NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """A chip of a topology that the TPU's compiler knows."""

    topology: str  # As `jax.experimental.topologies` names it.
    config: str  # How its cores are used: "megacore" makes one device of two.
    kind: str  # `device_kind` of a device of such a topology.
    hbm: int  # Bytes of memory that a program may use.
    bandwidth: float  # Bytes a second that can be read from it.
    clock: float  # Cycles a second.


CHIPS = {
    # 275 TFLOP/s by 2 cores of 4 units of 128 x 128.
    "v4-8": Chip("v4:2x2x1", "megacore", "TPU v4", int(30.75 * GIB), 1.2e12, 1.05e9),
    # 197 TFLOP/s by 4 units of 128 x 128.
    "v5e-1": Chip("v5e:1x1", "default", "TPU v5 lite", int(15.75 * GIB), 8.19e11, 1.5e9),
    # 459 TFLOP/s by 2 cores of 4 units of 128 x 128.
    "v5p-8": Chip("v5p:2x2x1", "megacore", "TPU v5", int(95.73 * GIB), 2.765e12, 1.75e9),
    # 918 TFLOP/s by 4 units of 256 x 256.
    "v6e-1": Chip("v6e:1x1", "default", "TPU v6 lite", int(31.24 * GIB), 1.638e12, 1.75e9),
}
"""By the accelerator type that Cloud TPU calls the smallest slice; programs use one chip of it."""

PRESENT = "present"  # In place of a name: the chip of this machine.


def chip(name: str) -> Chip:
    """The chip of this name; `PRESENT` is the TPU of this machine. ValueError if there is none."""
    if name in CHIPS:
        return CHIPS[name]
    if name != PRESENT:
        raise ValueError(f"There is no topology {name!r}; known are {', '.join(CHIPS)}, {PRESENT}.")
    import jax

    kind = jax.devices()[0].device_kind
    if found := next((found for found in CHIPS.values() if found.kind == kind), None):
        return found
    kinds = ", ".join(f"{one.kind} ({name})" for name, one in CHIPS.items())
    raise ValueError(
        f"There is no TPU here that this program knows, but {kind}; name a topology that it stands "
        f"for (--topology): {kinds}."
    )


def device(name: str) -> Any:
    """A described device to compile for; ValueError if there is no compiler for it here."""
    found = chip(name)
    require_compiler()
    from jax.experimental import topologies

    try:
        with _quiet():
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=found.topology, chip_config_name=found.config
            )
    except Exception as error:  # Of what kind it is depends on the release of JAX.
        raise ValueError(
            f"libtpu {compiler_version()} cannot describe {name} ({found.topology}); take another "
            f"release of libtpu or JAX ({str(error).splitlines()[0]})."
        ) from error
    return described.devices[0]


def compiler_version() -> str | None:
    """The installed release of libtpu, which holds the TPU's compiler; None without one."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_compiler() -> None:
    """Raises ValueError where the TPU's compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "The TPU's compiler is not installed; pip install libtpu, in an environment of its own "
            "(make test-tpu makes one, .venv-tpu)."
        )


def prepare() -> None:
    """Sets what libtpu reads of the environment, before JAX is imported.

    Programs are compiled on the CPU's side of JAX; another process may use libtpu meanwhile; and
    nobody asks Google's metadata server, which only Cloud machines have.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "true")


@contextlib.contextmanager
def _quiet() -> Any:
    """Keeps from standard error what libtpu says of a machine without TPU when it is loaded."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
