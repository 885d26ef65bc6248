"""What the TPU compiler thinks its program costs, instruction by instruction.

The compiler writes ``estimated_cycles`` on what its own cost model covers: fusions,
convolutions (matmuls are convolutions there), copies and the like. Their sum, loop bodies times
their known trip count, is the time of the core. What carries no estimate is costed from bytes and
published bandwidths, and kept apart: asynchronous copies and collectives, which may overlap with
the core, custom calls, and the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

from torch_tpu.aot.chips import Chip
from torch_tpu.aot.hlo import Computation, Instruction, Module, Shape

Kind = Literal["matmul", "vector", "copy", "async copy", "collective", "custom call", "other"]

# On the core: their times add up. The others run beside it.
CORE_KINDS: tuple[Kind, ...] = ("matmul", "vector", "copy")

_CYCLES = re.compile(rb'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"')
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# They move nothing: names for values, or the end of what a -start began.
_FREE = frozenset(
    {"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "while", "call"}
    | {"conditional", "after-all", "async-update", "async-done", "copy-done", "all-gather-done"}
    | {"all-reduce-done", "collective-permute-done", "opt-barrier", "partition-id", "replica-id"}
    | {"add-dependency", "send-done", "recv-done", "domain"}
)
_HBM_SPACES = frozenset({0})


@dataclass(frozen=True)
class Row:
    """One instruction of the optimised program; figures are totals over its ``count`` executions.

    seconds   from the compiler's cycles, or from bytes over a published bandwidth if there are none
    flops     of the matmuls and convolutions in it
    bytes     read from and written to HBM (for a collective: sent over the interconnect)
    bound     "MXU", "HBM" or "ICI": what takes longest at the chip's peak: flops, bytes or traffic
    """

    name: str
    opcode: str
    kind: Kind
    shape: str
    count: int
    cycles: int
    seconds: float
    flops: float
    bytes: float
    bound: str
    module: str
    op: str
    file: str
    line: int
    detail: str = ""


@dataclass(frozen=True)
class CostReport:
    """Costs of one execution on one device; see :func:`cost_of`.

    seconds_of      kind -> seconds; the core's kinds are disjoint in time, the others overlap
    core_seconds    the compiler's cycles over the clock
    low_seconds     step time if collectives and custom calls hide behind the core entirely
    high_seconds    step time if nothing overlaps
    flops, bytes    executed matmul FLOPs and HBM traffic per device
    uncosted        opcode -> executions that the compiler has no estimate for
    """

    chip: str
    cycles: int
    core_seconds: float
    low_seconds: float
    high_seconds: float
    flops: float
    bytes: float
    seconds_of: dict[str, float]
    uncosted: dict[str, int]
    unknown_trip_counts: int
    rows: list[Row] = field(repr=False)

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    def mfu(self, model_flops: float, peak: float) -> float:
        """Share of the peak that ``model_flops`` (per device) are of the core's time."""
        return model_flops / peak / self.core_seconds if self.core_seconds else 0.0

    def most_expensive(self, n: int = 20) -> list[Row]:
        return sorted(self.rows, key=lambda r: -r.seconds)[:n]

    def collectives(self) -> list[Row]:
        return sorted((r for r in self.rows if r.kind == "collective"), key=lambda r: -r.seconds)

    def by_module(self, depth: int | None = None) -> dict[str, float]:
        """Module path -> seconds on the core, most expensive first.

        ``depth`` cuts paths to so many components. "" stands for what has no module.
        """
        total: dict[str, float] = defaultdict(float)
        for row in self.rows:
            if row.kind in CORE_KINDS:
                parts = row.module.split(".")
                total[".".join(parts[:depth] if depth else parts)] += row.seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def by_line(self) -> dict[str, float]:
        """ "file:line" -> seconds on the core, most expensive first."""
        total: dict[str, float] = defaultdict(float)
        for row in self.rows:
            if row.kind in CORE_KINDS:
                total[f"{row.file}:{row.line}" if row.file else ""] += row.seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> CostReport:
        return CostReport(**{**data, "rows": [Row(**row) for row in data["rows"]]})


def cost_of(module: Module, chip: Chip, *, loops_once: bool = False) -> CostReport:
    """Cost an optimised program for ``chip``: one pass over the entry computation and its loops.

    ``loops_once`` counts every loop body once, however often it runs.
    """
    return _Costing(module, chip, loops_once).report()


def split_name(name: str) -> tuple[str, str]:
    """(module path, op) of a location name "model.layers.0|mm"; ("", name) for another's."""
    module, bar, op = name.rpartition("|")
    return (module, op) if bar else ("", name)


class _Costing:
    def __init__(self, module: Module, chip: Chip, loops_once: bool) -> None:
        self.module, self.chip, self.loops_once = module, chip, loops_once
        self.rows: list[Row] = []
        self.uncosted: dict[str, int] = defaultdict(int)
        self.unknown_trips = 0
        self.fused = cache(self._fused)
        self.touched = cache(self._touched)

    def report(self) -> CostReport:
        self.walk(self.module.entry_computation, 1)
        seconds: dict[str, float] = defaultdict(float)
        for row in self.rows:
            seconds[row.kind] += row.seconds
        cycles = sum(r.cycles for r in self.rows)
        core = cycles / self.chip.clock
        ici, calls = seconds["collective"], seconds["custom call"]
        extra = seconds["other"]
        return CostReport(
            chip=self.chip.name,
            cycles=cycles,
            core_seconds=core,
            low_seconds=max(core + calls + extra, ici),
            high_seconds=core + ici + calls + extra + seconds["async copy"],
            flops=sum(r.flops for r in self.rows),
            bytes=sum(r.bytes for r in self.rows if r.kind != "collective"),
            seconds_of=dict(seconds),
            uncosted=dict(sorted(self.uncosted.items(), key=lambda z: -z[1])),
            unknown_trip_counts=self.unknown_trips,
            rows=self.rows,
        )

    def walk(self, computation: Computation, count: int, estimated_only: bool = False) -> None:
        """Add the rows of a computation; ``estimated_only``: those with the compiler's cycles."""
        for i in computation.instructions:
            if i.opcode == "while":
                trips = self.trip_count(computation, i)
                for called in i.called:
                    self.walk(self.module.computations[called], count * trips, estimated_only)
            elif i.opcode in ("call", "conditional", "async-start"):
                inside = estimated_only or self.as_collective(i) is not None
                for called in i.called:
                    self.walk(self.module.computations[called], count, inside)
            found = _CYCLES.search(i.backend_config)
            if found or not (i.opcode in _FREE or estimated_only):
                self.add(computation, i, count, int(found[1]) if found else 0)

    def trip_count(self, computation: Computation, loop: Instruction) -> int:
        """From the loop itself or the compiler's note; 1, and a mark in the report, if unknown."""
        if self.loops_once:
            return 1
        trips = self.module.trip_count(computation, loop)
        if trips is None and (found := _TRIPS.search(loop.backend_config)):
            trips = int(found[1])
        self.unknown_trips += trips is None
        return 1 if trips is None else trips

    def as_collective(self, i: Instruction) -> Instruction | None:
        """The collective that an instruction is or starts; None if it is another."""
        if i.opcode.removesuffix("-start") in _COLLECTIVES:
            return i
        if i.opcode in ("async-start", "fusion", "custom-call"):
            for called in i.called:
                for inner in self.module.computations[called].instructions:
                    if found := self.as_collective(inner):
                        return found
        return None

    def add(self, computation: Computation, i: Instruction, count: int, cycles: int) -> None:
        collective = self.as_collective(i)
        flops = self.flops(computation, i)
        kind: Kind
        if collective is not None:
            sent, detail = self.traffic(collective)
            ici = sent / self.bandwidth(collective)
            self.row(i, "collective", count, cycles, ici, flops, sent, detail)
            return
        if not cycles and i.opcode == "async-start":
            return  # its computation was walked
        moved = self.bytes(computation, i)
        if cycles:
            if flops:
                kind = "matmul"
            elif i.opcode == "copy" or _only_moves(i.name):
                kind = "copy"
            else:
                kind = "vector"
        elif i.opcode.startswith(("copy-start", "slice-start", "dynamic-slice-start")):
            kind = "async copy"
            moved = _async_copy_bytes(i.shape)
        elif i.opcode == "custom-call":
            kind = "custom call"
            if _is_annotation(i.custom_call_target):
                return
        else:
            kind = "other"
        if not cycles:
            self.uncosted[i.opcode] += count
        self.row(i, kind, count, cycles, moved / self.chip.hbm_bandwidth, flops, moved, "")

    def row(
        self,
        i: Instruction,
        kind: Kind,
        count: int,
        cycles: int,
        fallback: float,
        flops: float,
        moved: float,
        detail: str,
    ) -> None:
        source = self.module.source_of(i)
        module, op = split_name(source.name)
        if kind == "collective":
            bound = "ICI"
            seconds = fallback
        else:
            seconds = cycles / self.chip.clock if cycles else fallback
            compute, memory = flops / self.chip.peak_bf16, moved / self.chip.hbm_bandwidth
            bound = "MXU" if compute > memory else "HBM"
        self.rows.append(
            Row(
                name=i.name,
                opcode=i.opcode,
                kind=kind,
                shape=str(i.shape),
                count=count,
                cycles=cycles * count,
                seconds=seconds * count,
                flops=flops * count,
                bytes=moved * count,
                bound=bound,
                module=module,
                op=op,
                file=source.file,
                line=source.line,
                detail=detail or i.custom_call_target,
            )
        )

    # -- operations ------------------------------------------------------------------------

    def flops(self, computation: Computation, i: Instruction) -> float:
        if i.opcode == "fusion":
            return sum(self.fused(c) for c in i.called)
        return _product_flops(computation, i)

    def _fused(self, called: int) -> float:
        computation = self.module.computations[called]
        total = 0.0
        for inner in computation.instructions:
            if inner.opcode == "fusion":
                total += sum(self.fused(c) for c in inner.called)
            else:
                total += _product_flops(computation, inner)
        return total

    # -- traffic ---------------------------------------------------------------------------

    def bytes(self, computation: Computation, i: Instruction) -> float:
        """HBM bytes of one execution: operands read and results written, padded as laid out.

        A fusion that only slices an operand, or updates a slice of it in place, touches the slice.
        """
        operands = [computation.by_id[o] for o in i.operands if o in computation.by_id]
        if i.opcode == "dynamic-update-slice" and len(operands) > 1:
            return 2 * _hbm(operands[1].shape)
        if i.opcode in ("slice", "dynamic-slice", "gather"):
            return 2 * _hbm(i.shape)
        if i.opcode == "fusion" and i.called:
            fused = self.module.computations[i.called[0]]
            touched = self.touched(i.called[0])
            reads = sum(
                touched.get(n, _hbm(o.shape)) if _hbm(o.shape) else 0
                for n, o in enumerate(operands)
            )
            return reads + _written(fused, i.shape)
        return sum(_hbm(o.shape) for o in operands) + _hbm(i.shape)

    def _touched(self, called: int) -> dict[int, int]:
        """Operand number -> bytes read, for operands that a fusion only slices or updates."""
        fused = self.module.computations[called]
        users: dict[int, list[Instruction]] = defaultdict(list)
        for i in fused.instructions:
            for o in i.operands:
                users[o].append(i)
        out: dict[int, int] = {}
        for i in fused.instructions:
            if i.opcode != "parameter":
                continue
            total: int | None = 0
            work = [(i.id, u) for u in users[i.id]]
            while work and total is not None:
                value, user = work.pop()
                first = bool(user.operands) and user.operands[0] == value
                if user.opcode in ("dynamic-slice", "slice", "gather") and first:
                    total += user.shape.padded_bytes
                elif user.opcode == "dynamic-update-slice" and first:
                    pass  # written in place
                elif user.opcode == "bitcast":
                    work += [(user.id, u) for u in users[user.id]]
                elif user.opcode == "fusion" and user.called:
                    inner = self.touched(user.called[0])
                    places = [n for n, o in enumerate(user.operands) if o == value]
                    known = all(n in inner for n in places)
                    total = total + sum(inner[n] for n in places) if known else None
                else:
                    total = None
            if total is not None and users[i.id]:
                out[i.parameter] = total
        return out

    def bandwidth(self, collective: Instruction) -> float:
        """Bytes/s for a collective: all links; for a permute both directions of one axis.

        A permute has neighbours along one axis, and the compiler sends to both at once.
        """
        if collective.opcode.startswith("collective-permute"):
            return self.chip.ici_bandwidth / self.chip.rank
        return self.chip.ici_bandwidth

    def traffic(self, i: Instruction) -> tuple[float, str]:
        """Bytes that each device sends in one execution (ring algorithms), and a description."""
        name = i.opcode.removesuffix("-start")
        shape = i.shape
        if i.opcode.endswith("-start") and name != "all-reduce" and len(shape.parts) > 1:
            shape = shape.parts[1]  # (operand, result, context …)
        whole = shape.bytes
        n = i.group_size
        share = (n - 1) / n if n > 1 else 1.0
        sent = {
            "all-gather": whole * share,
            "all-reduce": 2 * whole * share,
            "reduce-scatter": whole * (n - 1 if n > 1 else 1),
            "all-to-all": whole * share,
        }.get(name, float(whole))
        whom = "to a neighbour" if name == "collective-permute" else f"over {n or 'all'} devices"
        return sent, f"{name} {shape} {whom}"


def _only_moves(name: str) -> bool:
    return name.startswith(("copy", "transpose", "bitcast_fusion", "reshape"))


def _is_annotation(target: str) -> bool:
    """Custom calls that move nothing: marks for the compiler, and names for memory."""
    return target in (
        "Sharding",
        "AssumeGatherIndicesInBound",
        "AllocateBuffer",
        "PinToDevice",
        "ConcatBitcast",
    )


def _hbm(shape: Shape) -> int:
    if shape.parts:
        return sum(_hbm(p) for p in shape.parts)
    return shape.padded_bytes if shape.memory_space in _HBM_SPACES else 0


def _async_copy_bytes(shape: Shape) -> int:
    """A copy-start's shape is (destination, source, context)."""
    return shape.parts[0].padded_bytes if shape.parts else shape.padded_bytes


def _written(fused: Computation, shape: Shape) -> int:
    """Bytes the root writes: of an in-place update only the slice."""
    root = fused.by_id.get(fused.root)
    if root is None:
        return _hbm(shape)
    roots = [fused.by_id[o] for o in root.operands] if root.opcode == "tuple" else [root]
    shapes = shape.parts if root.opcode == "tuple" and shape.parts else (shape,)
    total = 0
    for r, s in zip(roots, shapes, strict=False):
        while r.opcode == "bitcast" and r.operands[0] in fused.by_id:
            r = fused.by_id[r.operands[0]]
        if r.opcode == "dynamic-update-slice" and _hbm(s):
            total += fused.by_id[r.operands[1]].shape.padded_bytes
        else:
            total += _hbm(s)
    return total


def _product_flops(computation: Computation, i: Instruction) -> float:
    """Multiply-adds times two of a dot or a convolution; 0 for any other instruction."""
    if i.opcode not in ("dot", "convolution"):
        return 0.0
    operands = [computation.by_id[o].shape for o in i.operands]
    if i.opcode == "dot":
        depth = 1
        for d in i.contracting[0]:
            depth *= operands[0].dims[d]
        return 2.0 * i.shape.elements * depth
    numbers = i.convolution
    lhs, rhs, out = operands[0].dims, operands[1].dims, i.shape.dims

    def size(dims: tuple[int, ...], number: int) -> int:
        return dims[numbers.get(number, [0])[0]] if dims else 1

    total = 2.0 * size(rhs, 3) * size(out, 10) * size(out, 9)
    for n, window in enumerate(i.window):
        spans = (lhs[numbers[11][n]], rhs[numbers[6][n]], out[numbers[12][n]])
        total *= _valid_positions(*spans, tuple(sorted(window.items())))
    return total


@cache
def _valid_positions(lhs: int, kernel: int, out: int, window: tuple[tuple[int, int], ...]) -> int:
    """Pairs of output and kernel positions that meet an element, not padding or a dilation hole.

    The TPU compiler writes batched matmuls as dilated convolutions, mostly holes.
    """
    w = dict(window)
    stride, dilation, holes = w.get(2) or 1, w.get(5) or 1, w.get(6) or 1
    low = w.get(3, 0)
    low -= (1 << 64) if low >= 1 << 63 else 0
    if kernel * out > 4_000_000:
        return kernel * out
    span = (lhs - 1) * holes + 1
    count = 0
    for o in range(out):
        for k in range(kernel):
            at = o * stride + k * dilation - low
            count += 0 <= at < span and at % holes == 0
    return count
