"""Device memory: what tensors hold, and what the plug-in holds.

*Allocated* is counted here: the bytes of the buffers that tensors stand on. Memory that a program
uses while it runs is not part of it, and a buffer counts as soon as the program that will write it
is enqueued. *Reserved* is what the plug-in says it has taken; where it keeps no account (XLA:CPU),
the same as allocated. There is no caching allocator in between, so nothing is ever held back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch_tpu import _C

from .devices import Device, checked_index
from .memory_history import _bytes, memory_by_line, memory_snapshot
from .memory_history import (
    _dump_snapshot as _dump_snapshot,
)
from .memory_history import (
    _record_memory_history as _record_memory_history,
)
from .memory_history import (
    _snapshot as _snapshot,
)

__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_by_line",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
]


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """As :func:`memory_stats`, nested: ``stats["allocated_bytes"]["all"]["current"]``."""
    return _C.device_stats(checked_index(device))


def memory_stats(device: Device = None) -> OrderedDict[str, int]:
    """Figures of a device's memory under the names ``torch.cuda.memory_stats`` has for them.

    * ``{allocated_bytes,active_bytes,requested_bytes}.all.{current,peak,allocated,freed}``: bytes
      of tensors. All three are the same here: nothing is rounded up, nothing lingers after its use.
    * ``reserved_bytes.all.{current,peak,allocated,freed}``: bytes the plug-in has taken.
    * ``{allocation,active}.all.{current,allocated,freed}``: the number of buffers.
    * ``num_ooms``, ``num_alloc_retries`` (0: nothing is retried), ``num_device_alloc``,
      ``num_device_free``, ``num_sync_all_streams``.

    Pools do not exist, so there is ``all`` only. Before the first use of a device all are 0.
    """
    flat: dict[str, int] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                flatten(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat[prefix] = value

    flatten("", memory_stats_as_nested_dict(device))
    return OrderedDict(sorted(flat.items()))


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold now."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes tensors have held, since the start or :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Device = None) -> int:
    """Bytes the plug-in has taken now."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes the plug-in has taken. Where it keeps the account this cannot be reset."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Lets :func:`max_memory_allocated` start again from what is allocated now."""
    _C.reset_peak_stats(checked_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Sets the totals ``allocated``, ``freed``, ``num_ooms`` and ``num_device_*`` back to 0."""
    _C.reset_accumulated_stats(checked_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of the device; of the machine where the device is its processor."""
    return _C.memory_info(checked_index(device))


def empty_cache() -> None:
    """Nothing to do: freed memory goes back to the plug-in at once. For code that calls it."""


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """The device's memory figures as a table to print.

    Args:
        device: default the current one.
        abbreviated: leave out the numbers of buffers.
    """
    index = checked_index(device)
    stats = memory_stats(index)
    rows = [
        ("Allocated memory", "allocated_bytes", _bytes),
        ("Active memory", "active_bytes", _bytes),
        ("Reserved memory", "reserved_bytes", _bytes),
    ]
    if not abbreviated:
        rows.append(("Buffers", "allocation", str))
    width = 78

    def cells(name: str, *values: str) -> str:
        return "|" + f" {name:<19}" + "".join(f"| {value:>11} " for value in values) + "|"

    def line(text: str) -> str:
        return f"| {text:<{width - 4}} |"

    free, total = mem_get_info(index)
    lines = [
        "=" * width,
        line(f"torch.tpu memory summary, device {index}"),
        line(f"OOMs: {stats['num_ooms']}    free: {_bytes(free)} of {_bytes(total)}"),
        "=" * width,
        cells("Metric", "current", "peak", "allocated", "freed"),
    ]
    for name, key, form in rows:
        lines.append("-" * width)
        values = (
            stats.get(f"{key}.all.{what}") for what in ("current", "peak", "allocated", "freed")
        )
        lines.append(cells(name, *("-" if value is None else form(value) for value in values)))
    lines.append("=" * width)
    return "\n".join(lines) + "\n"
