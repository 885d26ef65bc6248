"""What in a compiled program is worth a change, with the figure that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_tpu.aot.cost import CORE_KINDS

if TYPE_CHECKING:
    from torch_tpu.aot.compiled import Compiled
    from torch_tpu.aot.hlo import Shape

# Below these nothing is said.
_WASTE = 0.2
_SHARE = 0.1
_GIB = 2**30


def advise(program: Compiled) -> list[str]:
    out = []
    memory, cost = program.memory, program.cost
    if not memory.fits:
        out.append(
            f"does not fit: {-memory.headroom / _GIB:.2f} GiB too much; use a smaller batch, more "
            "devices or a mesh that divides more"
        )
    core = cost.core_seconds or 1.0
    copies = cost.seconds_of.get("copy", 0.0)
    if copies > _SHARE * core:
        out.append(
            f"{copies / core:.0%} of the core's time moves data without computing: look at "
            "transposes and at layouts of inputs and outputs"
        )
    ici = cost.seconds_of.get("collective", 0.0)
    if ici > core:
        out.append(
            f"collectives take {ici / core:.1f}x the core's time: fewer or larger shards, or "
            "another mesh"
        )
    wasted, total, worst = padding(program)
    if total and wasted > _WASTE * total:
        out.append(
            f"{wasted / total:.0%} of the HBM traffic of arrays is padding of their last two dims "
            f"to the tile; most in {worst}: prefer sizes that are multiples of 128 (last) and 8"
        )
    narrow = [
        r
        for r in cost.rows
        if r.kind == "matmul"
        and r.seconds > 0.02 * core
        and r.flops
        and _utilisation(r, program) < 0.2
    ]
    if sum(r.seconds for r in narrow) > _SHARE * core:
        worst_row = max(narrow, key=lambda r: r.seconds)
        where = f"{worst_row.file}:{worst_row.line}" if worst_row.file else worst_row.name
        out.append(
            f"matmuls below 20 % of the peak take {sum(r.seconds for r in narrow) / core:.0%} of "
            f"the core's time, first {worst_row.shape} at {where}: dims below 128 (a head_dim of "
            "64, a small batch) leave the matrix unit idle; float32 at high precision takes "
            "several passes"
        )
    if cost.unknown_trip_counts:
        out.append(
            f"{cost.unknown_trip_counts} loops have no known trip count and are counted once"
        )
    return out


def _utilisation(row: object, program: Compiled) -> float:
    return row.flops / program.target.chip.peak_bf16 / row.seconds  # type: ignore[attr-defined]


def padding(program: Compiled) -> tuple[int, int, str]:
    """(padding bytes, bytes with padding, the worst shape) over the results of all instructions."""
    wasted = total = most = 0
    worst = ""
    core = {r.name for r in program.cost.rows if r.kind in CORE_KINDS}
    for computation in program.module.computations.values():
        for i in computation.instructions:
            if i.name not in core:
                continue
            for shape in _arrays(i.shape):
                padded = shape.padded_bytes
                loss = padded - shape.bytes
                wasted, total = wasted + loss, total + padded
                if loss > most:
                    most, worst = loss, str(shape)
    return wasted, total, worst


def _arrays(shape: Shape) -> list[Shape]:
    return [s for p in shape.parts for s in _arrays(p)] if shape.parts else [shape]
