"""Reads the text of a program that XLA compiled: instructions in the order in which they run."""

import math
import re
from typing import NamedTuple

HBM = 0  # The memory space of arrays that name none; others lie on the chip.

_SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5}  # Bytes of an element; other names end in their bits.
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)([^{}]*)\})?")
_HEAD = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
# Name, shapes, opcode, text in parentheses, attributes.
_LINE = re.compile(r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:, ([a-z_]+=.*))?$")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|(?:true|false)_computation|branch_computations)=(%\S+|\{[^{}]*\})"
)


COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter"),
    *("all-to-all", "collective-permute", "ragged-all-to-all"),
)
"""Instructions by which devices exchange arrays; in the background, "-start" or "-done" follows."""


class Shape(NamedTuple):
    """An array: its element type, its dimensions, and its layout in memory."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()  # Dimensions, beginning with the one that varies fastest.
    tile: tuple[int, ...] = ()  # The last dimensions in memory are padded to multiples of these.
    space: int = HBM

    @property
    def bytes(self) -> int:
        """The size in bytes, including tile padding."""
        bits = re.search(r"\d+", self.dtype)
        size = _SIZES.get(self.dtype, int(bits[0]) / 8 if bits else 0)
        dims = [self.dims[axis] for axis in self.order] or list(self.dims[::-1])
        multiples = *self.tile[::-1], *[1] * len(dims)
        padded = [-(-dim // of) * of for dim, of in zip(dims, multiples, strict=False)]
        return math.ceil(size * math.prod(padded))


class Instruction(NamedTuple):
    """An instruction: its results, its operands, and the compiler's estimate."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]  # Names of instructions.
    given: str  # The text in its parentheses, such as the value of a constant.
    attributes: str
    called: list[str]  # Names of computations; a loop's are its condition and its body.
    cycles: int | None  # The TPU compiler's estimate, if there is one.
    scope: str  # The names of the functions and loops that it comes from, as in "jit(f)/while".


class HloModule:
    """A compiled program, parsed from `compiled.as_text()`."""

    def __init__(self, text: str) -> None:
        """Parses the text; ValueError if it has no entry computation."""
        self.computations: dict[str, list[Instruction]] = {}
        entry, lines = "", []
        for line in text.splitlines():
            if line.startswith(" "):
                if found := _LINE.match(line):
                    lines.append(_instruction(*found.groups("")))
            elif found := _HEAD.match(line):
                lines = self.computations[found[1]] = []
                entry = found[1] if line.startswith("ENTRY") else entry
        if not entry:
            raise ValueError("The text of a compiled program has no ENTRY computation.")
        self.entry = entry
        self.instructions = {one.name: one for part in self.computations.values() for one in part}

    def loops(self) -> list[Instruction]:
        """The loops whose trips depend on data, in the order of the text."""
        loops = (one for one in self.instructions.values() if one.opcode == "while")
        return [loop for loop in loops if self.trips(loop) is None]

    def trips(self, loop: Instruction) -> int | None:
        """The number of times that a loop's body runs; None if it depends on data."""
        root = self.computations[loop.called[0]][-1]
        if root.opcode == "compare" and "direction=LT" in root.attributes:
            bound = self.instructions[root.operands[-1]]
            if bound.opcode == "constant":
                return int(bound.given)
        return None

    def traffic(self, one: Instruction) -> int:
        """Bytes of HBM that an instruction reads and writes.

        If it takes or replaces a slice of an array, only the slice counts.
        """
        read = (
            min(shape.bytes, self._read(one, number, shape.bytes))
            for number, name in enumerate(one.operands)
            for shape in self.instructions[name].shapes
            if shape.space == HBM
        )
        return sum(read) + self._written(one)

    def _read(self, user: Instruction, number: int, whole: int) -> int:
        """Bytes that an instruction reads from one of its operands, which has `whole` bytes."""
        if user.opcode in ("dynamic-slice", "gather", "slice") and number == 0:
            return sum(shape.bytes for shape in user.shapes)
        if user.opcode == "dynamic-update-slice" and number == 0:
            return 0
        if user.opcode != "fusion":
            return whole
        lines = self.computations[user.called[0]]
        of = next(x for x in lines if x.opcode == "parameter" and x.given == str(number))
        return self._read_by_users(lines, of, whole)

    def _read_by_users(self, lines: list[Instruction], one: Instruction, whole: int) -> int:
        """Bytes that the instructions of a fusion read from one of them."""
        if one is lines[-1]:
            return whole
        return sum(
            self._read_by_users(lines, user, whole)
            if all(x.opcode in ("parameter", "bitcast") for x in self.inside(user))
            else self._read(user, user.operands.index(one.name), whole)
            for user in lines
            if one.name in user.operands
        )

    def exchanged(self, one: Instruction) -> tuple[str, int, int] | None:
        """A collective's kind, the bytes of its largest array, and the number of its devices.

        None for other instructions, and for the end of a collective that began in the background.
        An all-reduce of which a fusion keeps only a slice counts as a reduce-scatter.
        """
        if one.opcode == "fusion":
            lines = self.inside(one)
            summed = next((x for x in lines if x.opcode == "all-reduce"), None)
            if summed is None or lines[-1].opcode != "dynamic-slice":
                return None
            whole = self.exchanged(summed)
            return whole and ("reduce-scatter", *whole[1:])
        kind = one.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return None
        read = [shape for name in one.operands for shape in self.instructions[name].shapes]
        size = max(shape.bytes for shape in (*read, *one.shapes))
        if kind == "collective-permute":
            return kind, size, 2
        named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", one.attributes)
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", one.attributes)
        counted = re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", one.attributes)
        if named:
            axes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
            return kind, size, math.prod(int(axes[x]) for x in re.findall(r"'(\w+)'", named[2]))
        if listed:
            return kind, size, listed[1].count(",") + 1
        if counted:
            return kind, size, int(counted[1])
        raise ValueError(f"{one.name} does not say which devices meet: {one.attributes[:200]}")

    def inside(self, one: Instruction) -> list[Instruction]:
        """The instructions of a fusion; any other instruction itself."""
        return self.computations[one.called[0]] if one.opcode == "fusion" else [one]

    def _written(self, one: Instruction) -> int:
        """Bytes of HBM that an instruction writes."""
        parts = [one] * len(one.shapes)
        if one.opcode == "fusion":
            root = self.inside(one)[-1]
            names = root.operands if root.opcode == "tuple" else (root.name,)
            parts = [self.instructions[name] for name in names]
        return sum(
            min(shape.bytes, self._size_written(part))
            for shape, part in zip(one.shapes, parts, strict=False)
            if shape.space == HBM
        )

    def _size_written(self, one: Instruction) -> int:
        while one.opcode == "bitcast":
            one = self.instructions[one.operands[0]]
        if one.opcode == "fusion":
            return self._size_written(self.computations[one.called[0]][-1])
        if one.opcode == "dynamic-update-slice":
            one = self.instructions[one.operands[1]]
        return sum(shape.bytes for shape in one.shapes)


def _instruction(name: str, shapes: str, opcode: str, given: str, attributes: str) -> Instruction:
    cycles = re.search(r'"estimated_cycles":"?(\d+)', attributes)
    scope = re.search(r'op_name="([^"]*)"', attributes)
    return Instruction(
        name,
        opcode,
        tuple(map(_shape, _SHAPE.findall(shapes))),
        () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.-]+)", given)),
        given,
        attributes,
        re.findall(r"[\w.-]+", " ".join(_CALLED.findall(attributes))),
        int(cycles[1]) if cycles else None,
        scope[1] if scope else "",
    )


def _shape(found: tuple[str, str, str, str]) -> Shape:
    dtype, dims, order, layout = found
    space, tile = re.search(r"S\((\d+)\)", layout), re.search(r"T\(([\d,]+)\)", layout)
    dims, order, tile = map(_numbers, (dims, order, tile[1] if tile else ""))
    return Shape(dtype, dims, order, tile, int(space[1]) if space else HBM)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
