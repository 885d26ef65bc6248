"""Streams and events.

PJRT orders execution by data: a program starts when the values it reads are there, and a device
runs what it is given in order. A stream adds no order of its own. It is a name with a priority that
can be current in a thread; waiting on another stream or on an event is always satisfied, because
what uses the data waits for the data. ``query`` and ``synchronize`` of a stream speak of all work
of its device. Events are real: one captures the work in flight when it is recorded, is complete
when all of that work is, and remembers the time.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu import _C

from .devices import Device, checked_index

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "is_current_stream_capturing",
    "set_stream",
    "stream",
]


class Stream(torch.Stream):
    """A stream of a tpu device; see the module's text for what that means.

    Args:
        device: the device; default the current one.
        priority: 0, or -1 (any negative number) for high. Kept, but nothing is scheduled by it.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        on = torch.device("tpu", checked_index(device))
        return super().__new__(cls, device=on, priority=priority, **kwargs)

    @property
    def priority(self) -> int:
        """0, or -1 for high."""
        return _C.stream_priority(self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority: (0, -1)."""
        return 0, -1

    def wait_event(self, event: torch.Event) -> None:
        """Makes work issued later on this stream wait for ``event``."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Makes work issued later on this stream wait for what ``stream`` has been given so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records ``event``, or a new one, on this stream and returns it."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, torch.Stream):
            return False
        return (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"<torch.tpu.Stream device={self.device} stream_id={self.stream_id}>"


class Event(torch.Event):
    """A point in a device's work.

    Args:
        enable_timing: needed on both events of :meth:`elapsed_time`.
        blocking: accepted; :meth:`synchronize` always blocks without spinning.
        interprocess: events cannot be shared between processes; True raises NotImplementedError.
    """

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        if interprocess:
            raise NotImplementedError("torch.tpu.Event: cannot be shared between processes")
        return super().__new__(
            cls, device=torch.device("tpu"), enable_timing=enable_timing, blocking=blocking
        )

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from the end of the work this event captured to that of ``end_event``.

        Raises ValueError if one of them has no timing or was never recorded, RuntimeError if one
        is not complete.
        """
        return _C.elapsed_time(self, end_event)

    def __repr__(self) -> str:
        state = f"{self.event_id:#x}" if self.event_id else "not recorded"
        return f"<torch.tpu.Event {state}>"


def _wrap(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def current_stream(device: Device = None) -> Stream:
    """The calling thread's current stream on ``device``."""
    return _wrap(torch._C._accelerator_getStream(checked_index(device)))


def default_stream(device: Device = None) -> Stream:
    """Stream 0 of ``device``."""
    current = torch._C._accelerator_getStream(checked_index(device))
    return Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes ``stream`` and its device current in the calling thread; None does nothing."""
    if stream is not None:
        torch._C._accelerator_setStream(stream)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    set_stream(Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def is_current_stream_capturing() -> bool:
    """False: work is compiled into programs, not captured from a stream."""
    return False


class StreamContext:
    """Context manager that makes a stream and its device current; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            # Last in, first out: leaving goes back to the device we came from.
            self._before += [current_stream(), current_stream(self.stream.device)]
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc_info: object) -> None:
        if self.stream is not None:
            set_stream(self._before.pop())
            set_stream(self._before.pop())


def stream(stream: torch.Stream | None) -> StreamContext:
    """Context manager that makes ``stream`` current; see :class:`StreamContext`."""
    return StreamContext(stream)
