"""What programs cost, by the Python line that asked for them.

::

    with record() as recording:
        train()
    for line in recording.lines():
        print(line.line, line.compiles, line.execute_seconds)

Recording slows every op by a few microseconds: it looks up the line and asks the plug-in to tell
when each program is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from torch_tpu import _C
from torch_tpu.program import recompiles, source_lines
from torch_tpu.program.recompiles import Compile
from torch_tpu.program.source_lines import SourceLine


@dataclass
class LineActivity:
    """What one line of Python has cost.

    programs         different programs it ran
    compiles, hits   calls that compiled one, that found one in this process
    loads            calls that took one from the cache on disk (or beyond)
    lower_seconds    making programs' texts, in Python
    compile_seconds  compiling them, in the plug-in
    load_seconds     loading them from the cache
    launch_seconds   handing programs over; part of it may be their execution (XLA:CPU runs small
                     ones right there)
    execute_seconds  on the device, from hand-over, or the end of the program before, to the result
    wait_seconds     the host waited for results
    copy_seconds     copying, without that waiting
    bytes_to_device, bytes_to_host
    fallbacks        ops run on the CPU, fallback_seconds for them
    ops              name → calls
    """

    line: SourceLine | None
    programs: int = 0
    compiles: int = 0
    hits: int = 0
    loads: int = 0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    launch_seconds: float = 0.0
    execute_seconds: float = 0.0
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0
    fallback_seconds: float = 0.0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    fallbacks: int = 0
    waits: int = 0
    ops: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        """All of it but the launches, which overlap with executing."""
        return (
            self.lower_seconds
            + self.compile_seconds
            + self.load_seconds
            + self.execute_seconds
            + self.wait_seconds
            + self.copy_seconds
            + self.fallback_seconds
        )

    def add(self, kind: str, name: str, count: int, seconds: float, nbytes: int) -> None:
        """One total of the native core (csrc/core/activity.h)."""
        match kind:
            case "lower":
                self.lower_seconds += seconds
            case "compile":
                self.compiles += count
                self.compile_seconds += seconds
            case "load":
                self.loads += count
                self.load_seconds += seconds
            case "launch":
                self.launch_seconds += seconds
                self.ops[name] += count
            case "execute":
                self.execute_seconds += seconds
            case "wait":
                self.waits += count
                self.wait_seconds += seconds
            case "to_device":
                self.copy_seconds += seconds
                self.bytes_to_device += nbytes
            case "to_host":
                self.copy_seconds += seconds
                self.bytes_to_host += nbytes
            case "across":
                self.copy_seconds += seconds
            case "fallback":
                self.fallbacks += count
                self.fallback_seconds += seconds
                self.ops[f"{name} on the CPU"] += count
            case "hit":
                self.hits += count

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["line"] = None if self.line is None else str(self.line)
        out["file"] = None if self.line is None else self.line.file
        out["number"] = None if self.line is None else self.line.line
        out["ops"] = dict(self.ops)
        return out


class Recording:
    """The activity since it began. Readable while it is still going on."""

    def __init__(self) -> None:
        self._first_report = len(recompiles.reports())

    def lines(self) -> list[LineActivity]:
        """One entry per line that did anything, the most expensive first."""
        found: dict[int, LineActivity] = {}

        def entry(number: int) -> LineActivity:
            if number not in found:
                found[number] = LineActivity(source_lines.line_of(number))
            return found[number]

        for number, kind, name, count, nanoseconds, nbytes in _C.activity_totals():
            entry(number).add(kind, name, count, nanoseconds * 1e-9, nbytes)
        for number, programs in _C.activity_programs_per_line():
            entry(number).programs = programs
        return sorted(found.values(), key=lambda a: -a.seconds)

    def compiles(self) -> list[Compile]:
        """The programs compiled meanwhile, each with what set it apart."""
        return recompiles.reports()[self._first_report :]


def total(lines: list[LineActivity]) -> LineActivity:
    """The sum over lines; ``programs`` counts one that two lines ran twice."""
    out = LineActivity(None)
    for activity in lines:
        for f in fields(LineActivity):
            if f.name != "line":
                setattr(out, f.name, getattr(out, f.name) + getattr(activity, f.name))
    return out


@contextmanager
def record() -> Iterator[Recording]:
    """Context manager: adds up what is done, by line, on all threads. One at a time."""
    flags = _C.ACTIVITY_TOTALS | _C.ACTIVITY_LINES
    if _C.activity_flags() & _C.ACTIVITY_TOTALS:
        raise RuntimeError("activity is being recorded already; only one recording at a time")
    _C.activity_clear_totals()
    _C.activity_enable(flags)
    try:
        yield Recording()
    finally:
        _C.activity_disable(flags)
