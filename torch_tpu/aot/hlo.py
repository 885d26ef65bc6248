"""Reads the optimised program that a PJRT compiler hands out: HloModuleProto, wire format.

Only the fields that reports need are decoded; see xla/service/hlo.proto for their numbers. A
generated protobuf class would be the alternative, but nobody ships one without a whole framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# xla.PrimitiveType -> (name, bits)
ELEMENT_TYPES: dict[int, tuple[str, int]] = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    13: ("tuple", 0),
    14: ("opaque", 0),
    15: ("c64", 64),
    16: ("bf16", 16),
    17: ("token", 0),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}


_INTEGERS = frozenset({"s32", "s64", "u32", "u64"})


class HloFormatError(ValueError):
    """Bytes that are not an HLO module."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: an int, or the bytes of anything longer."""
    at, end = 0, len(data)
    try:
        while at < end:
            key, at = _varint(data, at)
            number, wire = key >> 3, key & 7
            if wire == 0:
                value, at = _varint(data, at)
                yield number, value
            elif wire == 2:
                size, at = _varint(data, at)
                if at + size > end:
                    raise HloFormatError(f"a field of {size} bytes at {at} passes the end, {end}")
                yield number, data[at : at + size]
                at += size
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
                yield number, data[at : at + size]
                at += size
            else:
                raise HloFormatError(f"wire type {wire} at byte {at}")
    except IndexError:
        raise HloFormatError(f"the message ends inside a field at byte {at}") from None


def _integers(value: Any) -> list[int]:
    """A repeated integer field's entry, packed or not."""
    if isinstance(value, int):
        return [value]
    out, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        out.append(number)
    return out


@dataclass(frozen=True)
class Shape:
    """An array (element type, dims, layout) or a tuple of shapes."""

    element: str
    bits: int
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory_space: int = 0
    parts: tuple[Shape, ...] = ()

    @staticmethod
    def parse(data: bytes) -> Shape:
        element, bits = "invalid", 0
        dims: list[int] = []
        parts: list[Shape] = []
        minor: list[int] = []
        tile: tuple[int, ...] = ()
        space = 0
        for number, value in fields(data):
            if number == 2:
                element, bits = ELEMENT_TYPES.get(value, (f"type{value}", 0))
            elif number == 3:
                dims += _integers(value)
            elif number == 4:
                parts.append(Shape.parse(value))
            elif number == 5:
                for inner, v in fields(value):
                    if inner == 1:
                        minor += _integers(v)
                    elif inner == 6 and not tile:
                        tile = tuple(d for n, w in fields(v) if n == 1 for d in _integers(w))
                    elif inner == 8:
                        space = v
        return Shape(element, bits, tuple(dims), tuple(minor), tile, space, tuple(parts))

    @property
    def elements(self) -> int:
        n = 1
        for d in self.dims:
            n *= d
        return n

    @property
    def bytes(self) -> int:
        """Bytes of the elements alone, all parts of a tuple together."""
        if self.parts:
            return sum(p.bytes for p in self.parts)
        return (self.elements * self.bits + 7) // 8

    @property
    def padded_bytes(self) -> int:
        """Bytes with the minor dims rounded up to the layout's tile."""
        if self.parts:
            return sum(p.padded_bytes for p in self.parts)
        if not self.tile or not self.dims:
            return self.bytes
        dims = list(self.dims)
        minor = self.minor_to_major or tuple(reversed(range(len(dims))))
        for d, t in zip(minor, reversed(self.tile), strict=False):
            dims[d] = -(-dims[d] // t) * t
        n = 1
        for d in dims:
            n *= d
        return (n * self.bits + 7) // 8

    def __str__(self) -> str:
        if self.parts:
            return "(" + ", ".join(map(str, self.parts)) + ")"
        return f"{self.element}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Source:
    """Where an instruction came from: the emitter's name for it, file and line."""

    name: str = ""
    file: str = ""
    line: int = 0


@dataclass
class Instruction:
    name: str = ""
    opcode: str = ""
    id: int = 0
    operands: list[int] = field(default_factory=list)
    called: list[int] = field(default_factory=list)
    backend_config: bytes = b""
    custom_call_target: str = ""
    direction: str = ""
    parameter: int = 0
    tuple_index: int = 0
    raw_shape: bytes = field(default=b"", repr=False)
    raw_metadata: bytes = field(default=b"", repr=False)
    raw_literal: bytes = field(default=b"", repr=False)
    raw_dot: bytes = field(default=b"", repr=False)
    raw_window: bytes = field(default=b"", repr=False)
    raw_convolution: bytes = field(default=b"", repr=False)
    raw_groups: list[bytes] = field(default_factory=list, repr=False)
    raw_devices: bytes = field(default=b"", repr=False)
    raw_axes: bytes = field(default=b"", repr=False)
    feature_groups: int = 1
    batch_groups: int = 1

    @cached_property
    def shape(self) -> Shape:
        return Shape.parse(self.raw_shape)

    @cached_property
    def integer(self) -> int | None:
        """The value of an integer scalar constant; None for anything else."""
        if self.opcode != "constant" or self.shape.dims or self.shape.element not in _INTEGERS:
            return None
        for number, value in fields(self.raw_literal):
            if 4 <= number <= 7:  # s32s, s64s, u32s, u64s
                found = _integers(value)[0]
                return found - (1 << 64) if found >= 1 << 63 else found
        return 0

    @cached_property
    def stack_frame(self) -> int:
        return next((v for n, v in fields(self.raw_metadata) if n == 15), 0)

    @cached_property
    def source(self) -> Source:
        name = file = ""
        line = 0
        for number, value in fields(self.raw_metadata):
            if number == 2:
                name = value.decode(errors="replace")
            elif number == 3:
                file = value.decode(errors="replace")
            elif number == 4:
                line = value
        return Source(name, file, line)

    @cached_property
    def contracting(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """A dot's contracting and batch dims: lhs, rhs, lhs batch, rhs batch."""
        out: tuple[list[int], ...] = ([], [], [], [])
        for number, value in fields(self.raw_dot):
            if 1 <= number <= 4:
                out[number - 1].extend(_integers(value))
        return out[0], out[1], out[2], out[3]

    @cached_property
    def convolution(self) -> dict[int, list[int]]:
        """ConvolutionDimensionNumbers by field number (3: kernel input feature, 4: output …)."""
        out: dict[int, list[int]] = {}
        for number, value in fields(self.raw_convolution):
            out.setdefault(number, []).extend(_integers(value))
        return out

    @cached_property
    def window(self) -> list[dict[int, int]]:
        """Windows of the spatial dims by field: 1 size, 2 stride, 3/4 padding, 5/6 dilation."""
        return [
            {n: v for n, v in fields(value) if isinstance(v, int)}
            for number, value in fields(self.raw_window)
            if number == 1
        ]

    @cached_property
    def group_size(self) -> int:
        """Devices in each replica group of a collective; 0 if it names none (then all)."""
        for group in self.raw_groups:
            return sum(len(_integers(v)) for n, v in fields(group) if n == 1)
        for number, value in fields(self.raw_devices):
            if number == 1:  # explicit groups
                return sum(len(_integers(v)) for n, v in fields(value) if n == 1)
            if number == 2:  # iota: groups x devices a group
                return next((v for n, v in fields(value) if n == 2), 0)
        return _axes_group(self.raw_axes)


def _axes_group(data: bytes) -> int:
    """Devices of a group given as axes of a mesh: axis i, or a part of its size."""
    sizes: list[int] = []
    total = 0
    for number, value in fields(data):
        if number == 1:
            sizes = [dict(fields(v)).get(2, 1) for n, v in fields(value) if n == 1]
        elif number == 2:
            axis = dict(fields(value))
            size = dict(fields(axis[2])).get(2, 1) if 2 in axis else sizes[axis.get(1, 0)]
            total = (total or 1) * size
    return total


@dataclass
class Computation:
    name: str = ""
    id: int = 0
    root: int = 0
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_id(self) -> dict[int, Instruction]:
        return {i.id: i for i in self.instructions}

    def constant(self, i: Instruction) -> int | None:
        """The integer that an instruction always gives; None if it is not known."""
        while i.opcode in ("copy", "bitcast", "convert", "reshape") and i.operands[0] in self.by_id:
            i = self.by_id[i.operands[0]]
        return i.integer

    def _uncopied(self, i: Instruction) -> Instruction:
        while i.opcode in ("copy", "bitcast"):
            i = self.by_id[i.operands[0]]
        return i

    def step(self, i: Instruction, place: int) -> int | None:
        """What a loop body adds to element ``place`` of its state in each round."""
        i = self._uncopied(i)
        if i.opcode != "add":
            return None
        for one, other in (i.operands, reversed(i.operands)):
            counter = self._uncopied(self.by_id[one])
            if counter.opcode == "get-tuple-element" and counter.tuple_index == place:
                return self.constant(self.by_id[other])
        return None


@dataclass
class Module:
    """``frames[id]`` is a (file, line) of the module's stack-frame table."""

    name: str
    entry: int
    computations: dict[int, Computation]
    frames: dict[int, Source]

    @property
    def entry_computation(self) -> Computation:
        return self.computations[self.entry]

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """How often the body of a ``while`` runs; None if it is no plain counting loop.

        The compiler does not keep the count of a loop on the instruction. It follows from the loop:
        an element k of the state starts at a constant, the body adds a constant to it, and the
        condition compares it with a constant.
        """
        condition, body = self._regions(loop)
        if condition is None or body is None:
            return None
        root = condition.by_id.get(condition.root)
        if root is None or root.opcode != "compare" or root.direction not in ("LT", "LE"):
            return None
        left, right = (condition._uncopied(condition.by_id[o]) for o in root.operands)
        limit, place = condition.constant(right), left.tuple_index
        if limit is None or left.opcode != "get-tuple-element":
            return None
        state = computation.by_id.get(loop.operands[0])
        if state is None or state.opcode != "tuple":
            return None
        start = computation.constant(computation.by_id[state.operands[place]])
        result = body.by_id.get(body.root)
        if result is None or result.opcode != "tuple":
            return None
        step = body.step(body.by_id[result.operands[place]], place)
        if start is None or not step or step < 0:
            return None
        return max(0, -(-(limit + (root.direction == "LE") - start) // step))

    def _regions(self, loop: Instruction) -> tuple[Computation | None, Computation | None]:
        """Condition and body of a ``while``, told apart by what they return."""
        found = [self.computations[c] for c in loop.called]
        condition = next((c for c in found if c.by_id[c.root].shape.element == "pred"), None)
        return condition, next((c for c in found if c is not condition), None)

    def source_of(self, instruction: Instruction) -> Source:
        """The instruction's source, its file and line from the frame table if need be."""
        source = instruction.source
        if not source.file and instruction.stack_frame in self.frames:
            frame = self.frames[instruction.stack_frame]
            return Source(source.name, frame.file, frame.line)
        return source


_INSTRUCTION_TEXT = {1: "name", 2: "opcode", 28: "custom_call_target", 63: "direction"}
_INSTRUCTION_RAW = {
    3: "raw_shape",
    8: "raw_literal",
    7: "raw_metadata",
    15: "raw_window",
    16: "raw_convolution",
    30: "raw_dot",
    43: "backend_config",
    87: "raw_devices",
    93: "raw_axes",
}
_INSTRUCTION_NUMBER = {
    9: "parameter",
    13: "tuple_index",
    35: "id",
    50: "feature_groups",
    58: "batch_groups",
}


def _instruction(data: bytes) -> Instruction:
    out = Instruction()
    for number, value in fields(data):
        if number in _INSTRUCTION_RAW:
            setattr(out, _INSTRUCTION_RAW[number], value)
        elif number in _INSTRUCTION_TEXT:
            setattr(out, _INSTRUCTION_TEXT[number], value.decode())
        elif number in _INSTRUCTION_NUMBER:
            setattr(out, _INSTRUCTION_NUMBER[number], value)
        elif number == 36:
            out.operands += _integers(value)
        elif number == 38:
            out.called += _integers(value)
        elif number == 49:
            out.raw_groups.append(value)
    return out


def _computation(data: bytes) -> Computation:
    out = Computation()
    for number, value in fields(data):
        if number == 1:
            out.name = value.decode()
        elif number == 2:
            out.instructions.append(_instruction(value))
        elif number == 5:
            out.id = value
        elif number == 6:
            out.root = value
    return out


def _frames(data: bytes) -> dict[int, Source]:
    """StackFrameIndexProto: file names, function names, locations, frames; ids count from 1."""
    files: list[str] = []
    locations: list[tuple[int, int]] = []
    frames: list[int] = []
    for number, value in fields(data):
        if number == 1:
            files.append(value.decode(errors="replace"))
        elif number == 3:
            entry = dict(fields(value))
            locations.append((entry.get(1, 0), entry.get(3, 0)))
        elif number == 4:
            frames.append(dict(fields(value)).get(1, 0))
    out = {}
    for i, location in enumerate(frames, 1):
        if 0 < location <= len(locations):
            file, line = locations[location - 1]
            out[i] = Source("", files[file - 1] if 0 < file <= len(files) else "", line)
    return out


def parse_module(data: bytes, kind: str = "hlo_with_config") -> Module:
    """The module of a compiler's optimised program.

    data  an HloModuleProtoWithConfig (kind "hlo_with_config") or an HloModuleProto ("hlo")

    Raises HloFormatError for anything else.
    """
    if kind == "hlo_with_config":
        data = next((v for n, v in fields(data) if n == 1 and isinstance(v, bytes)), b"")
    elif kind != "hlo":
        raise HloFormatError(f"format {kind!r}; expected 'hlo' or 'hlo_with_config'")
    name, entry = "", None
    computations: dict[int, Computation] = {}
    frames: dict[int, Source] = {}
    for number, value in fields(data):
        if number == 1:
            name = value.decode(errors="replace")
        elif number == 3:
            computation = _computation(value)
            computations[computation.id] = computation
        elif number == 6:
            entry = value
        elif number == 17 and isinstance(value, bytes):
            frames = _frames(value)
    if entry is None or entry not in computations:
        raise HloFormatError("no entry computation: not an HLO module")
    return Module(name, entry, computations, frames)
