"""TPU chips for which programs can be compiled without one: memory, bandwidth, clock, links.

Bandwidth and peak are those of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v4, v5e,
v5p and v6e). The memory is the part that the compiler lets a program use, somewhat less than the
chip has. The clock follows from the peak and from the products that the matrix units begin per
cycle; that of v6e is the least certain, because it is documented with half the units that its peak
takes. The bandwidth of links between chips and the approximate time of a hop are from the chapter
on TPUs of "How to Scale Your Model" (Austin et al., 2025, jax-ml.github.io/scaling-book).
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from typing import Any, NamedTuple

GIB = 2**30
HOP = 1e-6  # Seconds for a message from a chip to its neighbour.

# The axes of slices by number of chips, in a torus of three axes or of two.
CUBES = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8)}
CUBES |= {256: (4, 8, 8), 512: (8, 8, 8)}
SQUARES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
SQUARES |= {256: (16, 16)}


class Chip(NamedTuple):
    """A kind of chip that the TPU compiler knows."""

    name: str  # The prefix of accelerator types.
    config: str  # How its cores are used: "megacore" makes one device of two.
    kind: str  # `device_kind` of such a device.
    hbm: int  # Bytes of memory that a program may use.
    bandwidth: float  # Bytes per second that can be read from it.
    peak: float  # Floating-point operations per second, for products in bfloat16.
    clock: float  # Cycles per second.
    link: float  # Bytes per second that a link to a neighbour carries, each way.
    slices: dict[int, tuple[int, ...]]  # The axes of slices, by number of chips.
    counted: int = 1  # A chip's count in accelerator types: 1, or 2 for its two cores.

    def type(self, chips: int) -> str:
        """The accelerator type of a slice of `chips` chips."""
        return f"{self.name}-{chips * self.counted}"

    def exchange(self, opcode: str, size: int, chips: int) -> float:
        """Seconds of a collective in which `chips` chips exchange arrays of `size` bytes.

        A sum over all (all-reduce) is scattered and gathered again, one axis of the torus after
        another, along a ring of its chips; pieces go along two axes at once. A ring's first piece
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
    """The chip of an accelerator type such as v4-8; `PRESENT` is the TPU of this machine.

    ValueError if there is no such type.
    """
    if topology != PRESENT:
        return _slice(topology)[0]
    import jax

    kind = jax.devices()[0].device_kind
    if known := next((one for one in CHIPS if one.kind == kind), None):
        return known
    kinds = ", ".join(f"{one.kind} ({one.type(min(one.slices))})" for one in CHIPS)
    raise ValueError(
        f"There is no TPU here that this program knows, only {kind}; name the topology to compile "
        f"for (--topology): {kinds}."
    )


def device_bytes() -> tuple[str, int]:
    """The present device, as messages name it, and the bytes of its memory."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return device.device_kind, (device.memory_stats() or {}).get("bytes_limit", 2**63)
    return "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _slice(topology: str) -> tuple[Chip, int]:
    """The chip of an accelerator type, and the number of chips."""
    parts = re.fullmatch(r"(v\d+\w?)-(\d{1,6})", topology)
    known = next((one for one in CHIPS if parts and one.name == parts[1]), None)
    if parts is None or known is None:
        smallest = ", ".join(one.type(min(one.slices)) for one in CHIPS)
        raise ValueError(
            f"There is no topology {topology!r}; known are {smallest}, {PRESENT}, and larger "
            "slices of these kinds."
        )
    chips, over = divmod(int(parts[2]), known.counted)
    if over or chips not in known.slices:
        listed = ", ".join(map(known.type, known.slices))
        raise ValueError(f"There is no topology {topology!r} of {known.kind}; known are {listed}.")
    return known, chips


def devices(topology: str) -> list[Any]:
    """Described devices to compile for; ValueError if there is no compiler for them here."""
    known, chips = _slice(topology)
    require_compiler()
    from jax.experimental import topologies

    axes = "x".join(map(str, known.slices[chips]))
    try:
        with _quiet():
            described = topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{known.name}:{axes}",
                chip_config_name=known.config,
            )
    except Exception as error:  # Its type depends on the release of JAX.
        raise ValueError(
            f"libtpu {compiler_version()} cannot describe {topology} ({axes}); take another "
            f"release of libtpu or JAX ({str(error).splitlines()[0]})."
        ) from error
    assert len(described.devices) == chips, f"{topology} has {len(described.devices)} devices"
    return list(described.devices)


def smallest(need: int) -> list[str]:
    """The smallest accelerator type of each kind of chip with at least `need` bytes of memory."""
    return [one.type(min(one.slices)) for one in CHIPS if one.hbm >= need]


def smallest_mesh(chip: Chip, need: int) -> str | None:
    """The options for the smallest slice whose chips share `need` bytes, 0.5 GiB to spare each."""
    for chips in chip.slices:
        if need / chips + GIB / 2 <= chip.hbm:
            return f"--topology={chip.type(chips)} --mesh=model:{chips}"
    return None


def compiler_version() -> str | None:
    """The installed release of libtpu, which holds the TPU compiler; None without one."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_compiler() -> None:
    """Raises ValueError if the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "The TPU's compiler is not installed; pip install libtpu in a separate environment, or "
            "set PYTHONPATH=.libtpu, the folder into which make test-tpu installs it."
        )


def prepare() -> None:
    """Sets the environment variables that libtpu reads, before JAX is imported.

    Programs are compiled while JAX uses the CPU, another process may use libtpu meanwhile, and
    Google's metadata server, which only Cloud machines have, is not queried.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "true")


@contextlib.contextmanager
def _quiet() -> Any:
    """Hides libtpu's messages on standard error about a missing TPU while it is loaded."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
