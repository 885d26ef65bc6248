"""Timing shared by all backends; standard library only, since one of them runs without torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_us(
    call: Callable[[], object],
    sync: Callable[[], object],
    count: int,
    repeats: int = 5,
    warm: int | None = None,
) -> float:
    """Median over `repeats` of the mean time of `count` calls, in microseconds.

    `sync` waits for the device and belongs to the timed span, once per repeat. `warm` calls come
    first (default: a tenth of `count`, at least 3).
    """
    for _ in range(max(3, count // 10) if warm is None else warm):
        call()
    sync()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            call()
        sync()
        samples.append((time.perf_counter() - start) / count * 1e6)
    return round(statistics.median(samples), 2)


def once_ms(call: Callable[[], object]) -> float:
    """Time of one call in milliseconds: the cold first one, compilation included."""
    start = time.perf_counter()
    call()
    return round((time.perf_counter() - start) * 1e3, 1)
