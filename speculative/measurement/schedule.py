"""The time of a TPU program by its compiler's own estimates, along its schedule.

The compiler estimates the cycles of most instructions, but not the time of copies in the
background. So instructions run one after another here, as they are scheduled; copies in the
background take the bandwidth that instructions leave, and may have to be awaited.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from speculative.measurement.chips import Chip
from speculative.measurement.hlo import COLLECTIVES, HBM, HloModule, Instruction

# Opcodes that only give an array another place or layout, and those that a fusion may add to them.
_MOVES = {"copy", "transpose", "convert"}
_BESIDE = {"parameter", "bitcast", "reshape", "tuple"}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


class Cost(NamedTuple):
    """The cost of a run of a computation."""

    seconds: float
    bytes: int  # Read from and written to HBM.
    named: float = 0.0  # Seconds in the schedule's scope.
    exchanging: float = 0.0  # Seconds of collectives, which are part of all seconds.
    collectives: int = 0
    exchanged: int = 0  # Bytes of arrays that chips exchange.

    def times(self, trips: int) -> "Cost":
        """The cost of `trips` runs."""
        named, exchanging = trips * self.named, trips * self.exchanging
        meetings = trips * self.collectives, trips * self.exchanged
        return Cost(trips * self.seconds, trips * self.bytes, named, exchanging, *meetings)


class Schedule:
    """Computes what a program costs on a chip, and what the part in a `jax.named_scope` does.

    `trips` are those of loops whose trips depend on data, by scope; the others are decoding loops.
    """

    def __init__(
        self,
        program: HloModule,
        chip: Chip,
        scope: str = "",
        trips: Mapping[str, int] | None = None,
    ) -> None:
        self.program, self.chip, self.scope, self.trips = program, chip, scope, trips or {}
        self._costs: dict[str, Cost] = {}

    def cost(self, computation: str) -> Cost:
        """The cost of one run; a decoding loop counts as one trip.

        It is at least the time of all bytes at the chip's bandwidth, and at least that of all
        estimated cycles.
        """
        if computation not in self._costs:
            self._costs[computation] = self._run(self.program.computations[computation])
        return self._costs[computation]

    def _run(self, lines: list[Instruction]) -> Cost:
        bandwidth = self.chip.bandwidth
        now = named = waited = exchanging = 0.0
        total = count = exchanged = 0
        due: dict[str, float] = {}  # When collectives in the background end.
        background: dict[str, float] = {}  # Bytes left of copies, by age.

        def advance(seconds: float, rate: float) -> None:
            nonlocal now
            now, left = now + seconds, seconds * rate
            for name, size in list(background.items()):
                if left <= 0:
                    break
                background[name] -= min(left, size)
                left -= min(left, size)
                if background[name] < 1:  # A rounding error does not keep a copy in the queue.
                    del background[name]

        for one in lines:
            if one.opcode in _FREE:
                continue
            if exchange := self.program.exchanged(one):
                kind, size, chips = exchange
                seconds = self.chip.exchange(kind, size, chips)
                exchanging, count, exchanged = exchanging + seconds, count + 1, exchanged + size
                if one.opcode.endswith("-start"):  # The next instructions run meanwhile.
                    due[one.name] = now + seconds
                    continue
                advance(seconds, bandwidth)
                named += seconds + waited if self._inside(one) else 0
                waited = 0.0
            elif one.opcode.removesuffix("-done") in COLLECTIVES:
                seconds = max(0.0, due.pop(one.operands[0]) - now)
                advance(seconds, bandwidth)
                waited += seconds
            elif one.opcode.endswith("-start"):
                size = self._copied(one)
                total += size
                background[one.name] = size
            elif one.opcode.endswith("-done"):
                if one.operands[0] in background:  # The copies before it must be done too.
                    last = list(background).index(one.operands[0]) + 1
                    seconds = sum(list(background.values())[:last]) / bandwidth
                    advance(seconds, bandwidth)
                    waited += seconds
            else:
                cost = self._priced(one)
                total += cost.bytes
                exchanging, count = exchanging + cost.exchanging, count + cost.collectives
                exchanged += cost.exchanged
                seconds = max(cost.seconds, cost.bytes / bandwidth)
                if not seconds:
                    continue
                advance(seconds, bandwidth - cost.bytes / seconds)
                # The next instruction is the one that waited for a copy.
                named += seconds + waited if self._inside(one) else cost.named
                waited = 0.0
        seconds = now + sum(background.values()) / bandwidth
        return Cost(seconds, total, named, exchanging, count, exchanged)

    def loops(self) -> list[Instruction]:
        """The decoding loops, in the order of the text."""
        return [loop for loop in self.program.loops() if self._given(loop) is None]

    def _given(self, loop: Instruction) -> int | None:
        """The given trips of a loop in a scope of `trips`."""
        return next((self.trips[x] for x in loop.scope.split("/") if x in self.trips), None)

    def _inside(self, one: Instruction) -> bool:
        """Whether an instruction is in the schedule's scope."""
        return bool(self.scope) and self.scope in one.scope.split("/")

    def _priced(self, one: Instruction) -> Cost:
        """The cost of an instruction that runs in the foreground."""
        if one.opcode == "while":
            trips = self.program.trips(one) or self._given(one) or 1
            return self.cost(one.called[1]).times(trips)
        if one.opcode in ("conditional", "call"):
            return max(map(self.cost, one.called))
        return Cost((one.cycles or 0) / self.chip.clock, self.program.traffic(one))

    def _copied(self, start: Instruction) -> int:
        """Bytes of HBM that a copy in the background reads and writes."""
        if start.opcode not in ("copy-start", "slice-start"):
            return self.program.traffic(start)
        # The result names a copy's two ends, or a slice's whole array and the slice.
        size = start.shapes[1].bytes
        return sum(size for shape in start.shapes[:2] if shape.space == HBM)

    def copies(self, kernels: set[tuple[str, int]]) -> tuple[list[str], list[str]]:
        """Instructions that only copy a kernel in HBM: in decoding loops, and elsewhere.

        `kernels` are element types and numbers of elements, because a copy may have other
        dimensions. A prefetch in the background, from HBM into a memory on the chip, does not
        count: a step cannot do without that read.
        """
        inside = self._decoding()
        copying: tuple[list[str], list[str]] = [], []
        for name in sorted(self._reached(self.program.entry)):
            for one in self.program.computations[name]:
                sizes = {(shape.dtype, math.prod(shape.dims)) for shape in one.shapes[:1]}
                if sizes & kernels and self._moves(one):
                    copying[name not in inside].append(one.name)
        return copying

    def gathers(self, kernels: set[tuple[str, int]]) -> list[str]:
        """Instructions of decoding loops that gather a kernel from other chips."""
        return [
            one.name
            for name in sorted(self._decoding())
            for one in self.program.computations[name]
            if one.opcode.removesuffix("-start") == "all-gather"
            and {(shape.dtype, math.prod(shape.dims)) for shape in one.shapes} & kernels
        ]

    def _decoding(self) -> set[str]:
        """The computations that decoding loops run."""
        return set[str]().union(*(self._reached(loop.called[1]) for loop in self.loops()))

    def _reached(self, computation: str) -> set[str]:
        """A computation, and those that its loops and branches run."""
        reached = {computation}
        for one in self.program.computations[computation]:
            if one.opcode in ("while", "conditional", "call"):
                reached = reached.union(*map(self._reached, one.called))
        return reached

    def _moves(self, one: Instruction) -> bool:
        """Whether an instruction only gives an array of HBM another place or layout."""
        read = [shape for name in one.operands for shape in self.program.instructions[name].shapes]
        if all(shape.space != HBM for shape in read):
            return False
        if one.opcode == "copy-start":
            return all(shape.space == HBM for shape in one.shapes[:2])
        opcodes = {x.opcode for x in self.program.inside(one)}
        return bool(opcodes & _MOVES) and opcodes <= _MOVES | _BESIDE
