"""A program compiled for TPUs that are not here: what it needs, what it costs, and the program."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_tpu.aot import hlo as hlo_format
from torch_tpu.aot.chips import Target, resolve
from torch_tpu.aot.cost import CostReport, Row, cost_of

_FORMAT = 1


@dataclass(frozen=True)
class Memory:
    """HBM bytes of one device.

    arguments  what the program is called with: ``by_role`` of it are parameters, optimizer state …
    aliased    the part of ``arguments`` that outputs take over (donated)
    total      what has to fit: arguments + outputs - aliased + temporaries + program
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int
    available: int
    by_role: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.program

    @property
    def headroom(self) -> int:
        """Bytes left; negative: bytes missing."""
        return self.available - self.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


@dataclass
class Compiled:
    """What :func:`torch_tpu.aot.compile` returns.

    model_flops   per device and call: the model's matmuls, without rematerialisation
    text          the StableHLO that was compiled
    executable    libtpu's serialised executable, for the same version of libtpu
    mesh          axis -> size, if the program is partitioned
    """

    name: str
    target: Target
    partitions: int
    mesh: dict[str, int]
    train: bool
    parameters: int
    model_flops: float
    memory: Memory
    text: str
    hlo: bytes
    hlo_kind: str
    executable: bytes
    compiler: str
    compile_seconds: float
    key: str
    notes: list[str] = field(default_factory=list)

    @cached_property
    def module(self) -> hlo_format.Module:
        """The optimised program."""
        return hlo_format.parse_module(self.hlo, self.hlo_kind)

    @cached_property
    def cost(self) -> CostReport:
        return cost_of(self.module, self.target.chip)

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak in the core's time (no interconnect)."""
        return self.cost.mfu(self.model_flops, self.target.chip.peak_bf16)

    @property
    def mfu_range(self) -> tuple[float, float]:
        """MFU with nothing overlapped, and with everything overlapped that may be."""
        flops, peak = self.model_flops, self.target.chip.peak_bf16
        return tuple(
            flops / peak / s if s else 0.0 for s in (self.cost.high_seconds, self.cost.low_seconds)
        )  # type: ignore[return-value]

    @property
    def bound(self) -> str:
        """What takes longest at the published peaks: "MXU", "HBM" or "ICI"."""
        cost, chip = self.cost, self.target.chip
        times = {
            "MXU": cost.flops / chip.peak_bf16,
            "HBM": cost.bytes / chip.hbm_bandwidth,
            "ICI": cost.seconds_of.get("collective", 0.0),
        }
        return max(times, key=lambda name: times[name])

    def most_expensive(self, n: int = 20) -> list[Row]:
        """The instructions that take most time, with module path and Python line."""
        return self.cost.most_expensive(n)

    def advice(self) -> list[str]:
        """What to look at first; empty if nothing stands out."""
        from torch_tpu.aot.advice import advise

        return advise(self)

    def hlo_text(self) -> str:
        """A listing of the optimised program, computation by computation."""
        from torch_tpu.aot.listing import listing

        return listing(self.module)

    def report(self, top: int = 20) -> dict[str, Any]:
        """Everything but the programs, JSON-serialisable; sizes in bytes, times in seconds."""
        cost, memory = self.cost, self.memory
        low, high = self.mfu_range
        return {
            "name": self.name,
            "target": self.target.name,
            "topology": self.target.topology,
            "devices": self.partitions,
            "mesh": self.mesh,
            "train": self.train,
            "parameters": self.parameters,
            "fits": memory.fits,
            "memory": {**asdict(memory), "total": memory.total, "headroom": memory.headroom},
            "time": {
                "core_seconds": cost.core_seconds,
                "low_seconds": cost.low_seconds,
                "high_seconds": cost.high_seconds,
                "by_kind": cost.seconds_of,
                "cycles": cost.cycles,
                "clock": self.target.chip.clock,
            },
            "model_flops": self.model_flops,
            "flops": cost.flops,
            "bytes": cost.bytes,
            "intensity": cost.intensity,
            "bound": self.bound,
            "mfu": self.mfu,
            "mfu_range": [low, high],
            "uncosted": cost.uncosted,
            "unknown_trip_counts": cost.unknown_trip_counts,
            "by_module": dict(list(cost.by_module().items())[:top]),
            "by_line": dict(list(cost.by_line().items())[:top]),
            "most_expensive": [asdict(r) for r in self.most_expensive(top)],
            "collectives": [asdict(r) for r in cost.collectives()[:top]],
            "advice": self.advice(),
            "notes": self.notes,
            "compiler": self.compiler,
            "compile_seconds": self.compile_seconds,
            "key": self.key,
        }

    def to_json(self) -> str:
        return json.dumps(self.report(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write everything, the executable included, to one file."""
        state = {f: getattr(self, f) for f in self.__dataclass_fields__}
        state["target"] = self.target.name
        Path(path).write_bytes(pickle.dumps({"format": _FORMAT, **state}))

    @staticmethod
    def load(path: str | Path) -> Compiled:
        """Read what :meth:`save` wrote. The file can run code: load only your own.

        Raises ValueError for a file of another kind.
        """
        try:
            state = pickle.loads(Path(path).read_bytes())
            written = state.pop("format")
        except (pickle.UnpicklingError, AttributeError, KeyError, EOFError) as error:
            raise ValueError(f"{path}: not a saved torch_tpu.aot program ({error})") from None
        if written != _FORMAT:
            raise ValueError(f"{path}: format {written}; expected {_FORMAT}")
        return Compiled(**{**state, "target": resolve(state["target"])})


def cache_key(text: str, topology: str, partitions: int, compiler: str) -> str:
    """Names a program, its compile options and its compiler: equal keys, equal executables."""
    digest = hashlib.sha256()
    for part in (text, topology, str(partitions), compiler):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()
