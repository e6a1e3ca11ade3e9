"""TPU chips for which programs can be compiled without one: memory, bandwidth, clock, links.

Bandwidth and peak are those of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, v5e,
v5p and v6e). The memory is what the compiler lets a program use: somewhat less than the chip has.
The clock follows from the peak and from the products that the matrix units begin in a cycle; that
of v6e is the least certain, for it is documented with half the units that its peak takes. What
links between chips carry, and about how long a hop takes, is from the chapter on TPUs of "How to
Scale Your Model" (Austin et al., 2025, jax-ml.github.io/scaling-book).
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from typing import Any, NamedTuple

GIB = 2**30
HOP = 1e-6  # Seconds for a message from a chip to its neighbour.

# Chips of slices in a torus of three axes, or of two.
CUBES = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8)}
CUBES |= {256: (4, 8, 8), 512: (8, 8, 8)}
SQUARES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
SQUARES |= {256: (16, 16)}


class Chip(NamedTuple):
    """A kind of chip that the TPU's compiler knows."""

    name: str  # What accelerator types begin with.
    config: str  # How its cores are used: "megacore" makes one device of two.
    kind: str  # `device_kind` of such a device.
    hbm: int  # Bytes of memory that a program may use.
    bandwidth: float  # Bytes a second that can be read from it.
    peak: float  # Floating-point operations a second of products in bfloat16.
    clock: float  # Cycles a second.
    link: float  # Bytes a second that a link to a neighbour carries, each way.
    slices: dict[int, tuple[int, ...]]  # The axes of slices of so many chips.
    counted: int = 1  # What accelerator types count of each chip: one, or its two cores.

    def type(self, chips: int) -> str:
        """The accelerator type of a slice of so many chips."""
        return f"{self.name}-{chips * self.counted}"

    def exchange(self, opcode: str, size: int, chips: int) -> float:
        """Seconds of a collective of so many chips over arrays of a size in bytes.

        A sum over all (all-reduce) is scattered and gathered again, each axis of the torus after
        the other, along a ring of its chips; pieces go along two axes at once. A ring's first piece
        takes a hop for each chip but one, and links carry all but a chip's own share.
        """
        if opcode == "collective-permute":
            return HOP + size / self.link
        rounds = 2 if opcode == "all-reduce" else 1
        hops = sum(axis - 1 for axis in self.slices.get(chips, (chips,)))
        return rounds * (hops * HOP + size * (chips - 1) / chips / (2 * self.link))


CHIPS = (
    # 275 TFLOP/s by 2 cores of 4 units of 128 x 128.
    Chip("v4", "megacore", "TPU v4", int(30.75 * GIB), 1.2e12, 2.75e14, 1.05e9, 4.5e10, CUBES, 2),
    # 197 TFLOP/s by 4 units of 128 x 128.
    Chip(
        "v5e", "default", "TPU v5 lite", int(15.75 * GIB), 8.19e11, 1.97e14, 1.5e9, 4.5e10, SQUARES
    ),
    # 459 TFLOP/s by 2 cores of 4 units of 128 x 128.
    Chip("v5p", "megacore", "TPU v5", int(95.73 * GIB), 2.765e12, 4.59e14, 1.75e9, 9e10, CUBES, 2),
    # 918 TFLOP/s by 4 units of 256 x 256.
    Chip(
        "v6e", "default", "TPU v6 lite", int(31.24 * GIB), 1.638e12, 9.18e14, 1.75e9, 9e10, SQUARES
    ),
)

PRESENT = "present"  # In place of an accelerator type: the chips of this machine.


def chip(topology: str) -> Chip:
    """The chip of an accelerator type, as v4-8; `PRESENT` is the TPU of this machine.

    ValueError if there is no such type.
    """
    if topology != PRESENT:
        return _slice(topology)[0]
    import jax

    kind = jax.devices()[0].device_kind
    if found := next((found for found in CHIPS if found.kind == kind), None):
        return found
    kinds = ", ".join(f"{one.kind} ({one.type(min(one.slices))})" for one in CHIPS)
    raise ValueError(
        f"There is no TPU here that this program knows, but {kind}; name a topology that it stands "
        f"for (--topology): {kinds}."
    )


def device_bytes() -> tuple[str, int]:
    """The present device, for people, and the bytes of its memory."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return device.device_kind, (device.memory_stats() or {}).get("bytes_limit", 2**63)
    return "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _slice(topology: str) -> tuple[Chip, int]:
    """The chip of an accelerator type, and how many there are."""
    found = re.fullmatch(r"(v\d+\w?)-(\d{1,6})", topology)
    known = next((one for one in CHIPS if found and one.name == found[1]), None)
    if found is None or known is None:
        smallest = ", ".join(one.type(min(one.slices)) for one in CHIPS)
        raise ValueError(
            f"There is no topology {topology!r}; known are {smallest}, {PRESENT}, and larger "
            "slices of these kinds."
        )
    chips, over = divmod(int(found[2]), known.counted)
    if over or chips not in known.slices:
        listed = ", ".join(map(known.type, known.slices))
        raise ValueError(f"There is no topology {topology!r} of {known.kind}; known are {listed}.")
    return known, chips


def devices(topology: str) -> list[Any]:
    """Described devices to compile for; ValueError if there is no compiler for them here."""
    found, chips = _slice(topology)
    require_compiler()
    from jax.experimental import topologies

    axes = "x".join(map(str, found.slices[chips]))
    try:
        with _quiet():
            described = topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{found.name}:{axes}",
                chip_config_name=found.config,
            )
    except Exception as error:  # Of what kind it is depends on the release of JAX.
        raise ValueError(
            f"libtpu {compiler_version()} cannot describe {topology} ({axes}); take another "
            f"release of libtpu or JAX ({str(error).splitlines()[0]})."
        ) from error
    assert len(described.devices) == chips, f"{topology} has {len(described.devices)} devices"
    return list(described.devices)


def smallest(need: int) -> list[str]:
    """The accelerator types of a chip that has so many bytes of memory, of each kind."""
    return [one.type(min(one.slices)) for one in CHIPS if one.hbm >= need]


def smallest_mesh(chip: Chip, need: int) -> str | None:
    """The options of the smallest slice whose chips share so many bytes, half a GiB spare."""
    for chips in chip.slices:
        if need / chips + GIB / 2 <= chip.hbm:
            return f"--topology={chip.type(chips)} --mesh=model:{chips}"
    return None


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
