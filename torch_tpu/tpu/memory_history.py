"""Device memory by buffer, with the Python code that allocated it.

``torch.tpu.memory._record_memory_history()`` starts, ``_snapshot()`` and ``_dump_snapshot(file)``
give what https://pytorch.org/memory_viz shows, :func:`memory_by_line` is the same as a text.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from torch_tpu import _C

from .devices import Device, checked_index, device_count

__all__ = ["memory_by_line", "memory_snapshot"]


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "python",
    max_entries: int = 1 << 20,
    **kwargs: Any,
) -> None:
    """Records allocations and frees from now on, as ``torch.cuda.memory._record_memory_history``.

    Args:
        enabled: "all" or "state" start, forgetting what was recorded before; None stops.
        context: None records no Python stacks; anything else does.
        stacks: "python" or "all"; C++ frames are never recorded.
        max_entries: the events kept, the latest ones; with "state" there are none.

    Costs some microseconds per op. Buffers that existed before are known without their stacks.
    """
    del kwargs  # devices, clear_history, …: all devices are recorded, each start clears
    if enabled not in (None, "all", "state"):
        raise ValueError(f"_record_memory_history: enabled: got {enabled!r}; expected all or state")
    if stacks not in ("python", "all"):
        raise ValueError(f"_record_memory_history: stacks: got {stacks!r}; expected python or all")
    if enabled is None:
        _C.memory_history_stop()
        return
    entries = 0 if enabled == "state" else min(max_entries, 1 << 40)
    _C.memory_history_start(entries, context is not None)


def _frames(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The event's stack, innermost first. In a backward pass it starts at the forward line."""
    frames = event["frames"]
    line = event["line"]
    if line is not None:
        file, number, function, backward = line
        if backward or not frames:
            name = f"{function} (backward of it)" if backward else function
            frames = [{"name": name, "filename": file, "line": number}, *frames]
    # The op is what a C++ frame would have told.
    return [{"name": event["producer"], "filename": "tpu", "line": 0}, *frames]


def _blocks(device: int) -> list[dict[str, Any]]:
    _C.cut_traces()  # what Fused mode has recorded gets its memory now
    return sorted(_C.memory_blocks(device), key=lambda event: event["addr"])


def memory_snapshot(device: Device = None) -> list[dict[str, Any]]:
    """The buffers of every device, or of ``device`` alone, as ``torch.cuda.memory_snapshot``.

    There is no caching allocator: each buffer is a segment of its own, with one block. Addresses
    are made up, and no two buffers of a process ever have the same.
    """
    indices = range(device_count()) if device is None else [checked_index(device)]
    segments = []
    for index in indices:
        for event in _blocks(index):
            size = event["size"]
            frames = _frames(event)
            block = {
                "address": event["addr"],
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames,
            }
            segments.append(
                {
                    "device": index,
                    "address": event["addr"],
                    "stream": 0,
                    "segment_type": "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "total_size": size,
                    "allocated_size": size,
                    "active_size": size,
                    "requested_size": size,
                    "frames": frames,
                    "blocks": [block],
                }
            )
    return segments


def _snapshot(device: Device = None, **kwargs: Any) -> dict[str, Any]:
    """Buffers and recorded events in the form of ``torch.cuda.memory._snapshot``."""
    del kwargs
    _C.cut_traces()
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device_count())]
    keep = ("action", "addr", "size", "stream", "time_us")
    for event in _C.memory_history():
        entry = {name: event[name] for name in keep}
        traces[event["device"]].append({**entry, "frames": _frames(event)})
    return {
        "segments": memory_snapshot(device),
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(filename: str = "dump_snapshot.pickle", **kwargs: Any) -> None:
    """Writes :func:`_snapshot` to a file that PyTorch's memory viewer reads."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(**kwargs), file)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _totals(events: Iterable[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    """(place, op, buffers, bytes) of buffers, the largest first."""
    sums: dict[tuple[str, str], list[int]] = {}
    for event in events:
        line = event["line"]
        place = "before recording began, or outside Python"
        if line is not None:
            file, number, function, backward = line
            place = f"{file}:{number} in {function}" + (" (backward of it)" if backward else "")
        entry = sums.setdefault((place, event["producer"]), [0, 0])
        entry[0] += 1
        entry[1] += event["size"]
    rows = [(place, op, count, size) for (place, op), (count, size) in sums.items()]
    return sorted(rows, key=lambda row: (-row[3], row[0], row[1]))


def memory_by_line(device: Device = None, top: int = 20) -> str:
    """What holds the device's memory now: the ``top`` lines of Python, as a table to print.

    Lines are known for what was allocated since ``_record_memory_history()``.
    """
    index = checked_index(device)
    rows = _totals(_blocks(index))
    total = sum(row[3] for row in rows)
    buffers = sum(row[2] for row in rows)
    lines = [f"torch.tpu memory of device {index}: {_bytes(total)} in {buffers} buffers"]
    for place, op, count, size in rows[:top]:
        share = 100 * size / total if total else 0
        lines.append(f"{_bytes(size):>11} {share:5.1f} % {count:6} x {op}  {place}")
    if len(rows) > top:
        rest = rows[top:]
        size, count = sum(r[3] for r in rest), sum(r[2] for r in rest)
        share = 100 * size / total if total else 0
        lines.append(f"{_bytes(size):>11} {share:5.1f} % {count:6} x in {len(rest)} more places")
    return "\n".join(lines) + "\n"
