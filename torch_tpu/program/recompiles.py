"""Why a program was compiled: every compile with its line, and what set it apart from the nearest.

Everything that compiles reports here, single ops as well as whole graphs::

    report_compile("aten::add.Tensor", describe(names, args, storages))

``TORCH_TPU_LOG=recompiles`` prints the reports to standard error; ``TORCH_LOGS=recompiles`` and
``torch._logging.set_logs(recompiles=True)`` put them among Dynamo's own.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch._logging._internal import getArtifactLogger

from torch_tpu.program import source_lines
from torch_tpu.program.describe import Operand
from torch_tpu.program.source_lines import SourceLine

# Programs of one op that a new one is compared with, and reports that are kept.
_MAX_COMPARED = 32
_MAX_REPORTS = 8192
_MAX_SHOWN = 6
_MAX_VALUE = 120

ABSENT = "absent"


@dataclass(frozen=True)
class Change:
    """One part of a program's key that differs from the nearest program's."""

    label: str
    before: Any
    after: Any

    def dims(self) -> list[tuple[int, int, int]]:
        """For a shape of the same rank: (dim, before, after) of each size that differs."""
        if not self.label.startswith("shape of") or self.before is self.after:
            return []
        if not isinstance(self.before, tuple) or not isinstance(self.after, tuple):
            return []
        if len(self.before) != len(self.after):
            return []
        pairs = enumerate(zip(self.before, self.after, strict=True))
        return [(d, a, b) for d, (a, b) in pairs if a != b]

    def __str__(self) -> str:
        before, after = self.before, self.after
        lists = isinstance(before, tuple) and isinstance(after, tuple)
        if lists and len(before) == len(after) and self.label.split()[0].endswith("s"):
            differ = [i for i in range(len(before)) if before[i] != after[i]]
            shown = ", ".join(f"[{i}]: {before[i]} → {after[i]}" for i in differ[:_MAX_SHOWN])
            more = f" and {len(differ) - _MAX_SHOWN} more" if len(differ) > _MAX_SHOWN else ""
            return f"{self.label}: {shown}{more}"
        label = self.label
        if label.startswith("argument `") and not (isinstance(before, Operand) or before is ABSENT):
            label = f"static {label}" if not isinstance(after, Operand) else label
        text = f"{label}: {_short(before)} → {_short(after)}"
        dims = self.dims()
        if dims and len(before) > 1:
            text += " (" + ", ".join(f"dim {d}: {a} → {b}" for d, a, b in dims) + ")"
        return text


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


@dataclass(frozen=True)
class Compile:
    """One compiled program.

    number     counts the programs of this name, from 1
    nearest    the earlier program of the same name with the fewest differences; None for the first
    changes    the differences; none if the nearest had the very same key and was dropped since
    exact      whether the description is all of the key: else there may be more differences
    """

    name: str
    number: int
    line: SourceLine | None
    description: Mapping[str, Any]
    nearest: Compile | None = None
    changes: tuple[Change, ...] = ()
    exact: bool = True

    @property
    def is_recompile(self) -> bool:
        return self.nearest is not None

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line is not None else ""
        head = f"{self.name}{where}: "
        if self.nearest is None:
            return head + "new program, the first of this name"
        of = f"program {self.nearest.number}"
        if self.nearest.line is not None and self.nearest.line != self.line:
            of += f" ({self.nearest.line})"
        head += f"new program {self.number}; the nearest is {of}"
        if not self.changes and not self.exact:
            return head + ", which differs in layouts or in which results are wanted"
        if not self.changes:
            return head + ", the same, which the cache has dropped (TORCH_TPU_MAX_PROGRAMS)"
        shown = [f"\n    {change}" for change in self.changes[:_MAX_SHOWN]]
        if len(self.changes) > _MAX_SHOWN:
            shown.append(f"\n    and {len(self.changes) - _MAX_SHOWN} more differences")
        return head + ", which differs in" + "".join(shown)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """The parts that differ, in the order of ``after``."""
    changes = [
        Change(label, before.get(label, ABSENT), value)
        for label, value in after.items()
        if label not in before or before[label] != value
    ]
    changes += [Change(label, v, ABSENT) for label, v in before.items() if label not in after]
    return tuple(changes)


_lock = threading.Lock()
_by_name: dict[str, deque[Compile]] = {}
_numbers: dict[str, int] = {}
_reports: deque[Compile] = deque(maxlen=_MAX_REPORTS)


def report_compile(
    name: str,
    description: Mapping[str, Any],
    *,
    line: SourceLine | None = None,
    exact: bool = True,
) -> Compile:
    """Note that a program is about to be compiled, and print why if that is asked for.

    Args:
        name: of the op, graph or trace. Programs of one name are compared with each other.
        description: label → value of each part of its key, see :func:`describe.describe`. Values
            are compared with ``==``.
        line: default the user's line that is running.
        exact: whether programs of equal descriptions have equal keys.
    """
    if line is None:
        line = source_lines.current_line()
    with _lock:
        earlier = _by_name.setdefault(name, deque(maxlen=_MAX_COMPARED))
        nearest: Compile | None = None
        changes: tuple[Change, ...] = ()
        for other in reversed(earlier):
            found = differences(other.description, description)
            if nearest is None or len(found) < len(changes):
                nearest, changes = other, found
                if len(found) <= 1:
                    break
        number = _numbers[name] = _numbers.get(name, 0) + 1
        # Only the direct predecessor is kept alive, not the whole chain of them.
        known = nearest and Compile(nearest.name, nearest.number, nearest.line, nearest.description)
        compiled = Compile(name, number, line, description, known, changes, exact)
        earlier.append(compiled)
        _reports.append(compiled)
    _announce(compiled)
    return compiled


def reports() -> list[Compile]:
    """The compiles of this process, oldest first; the latest 8,192."""
    with _lock:
        return list(_reports)


def clear() -> None:
    """Forget all compiles, for tests and to report on a part of a program."""
    with _lock:
        _by_name.clear()
        _numbers.clear()
        _reports.clear()


# ---- printing ----

LOGS = ("recompiles",)


@cache
def _asked() -> frozenset[str]:
    """The names in TORCH_TPU_LOG; a warning about unknown ones."""
    words = {w.strip() for w in os.environ.get("TORCH_TPU_LOG", "").split(",") if w.strip()}
    if unknown := sorted(words - set(LOGS)):
        warnings.warn(
            f"TORCH_TPU_LOG: no such log: {', '.join(unknown)}; there is {', '.join(LOGS)}",
            stacklevel=2,
        )
    return frozenset(words)


@cache
def _torch_logger() -> Any:
    # Below "torch", whose handlers torch._logging sets up.
    return getArtifactLogger("torch.tpu", "recompiles")


def _announce(compiled: Compile) -> None:
    if "recompiles" in _asked():
        print(f"[torch_tpu] {compiled}", file=sys.stderr, flush=True)
    if compiled.is_recompile:  # as Dynamo does, which is silent about a first compile
        _torch_logger().debug("%s", compiled)
