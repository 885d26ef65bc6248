"""The programs of this process: names that serving frameworks look for, and a way to drop them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from torch_tpu import _C

__all__: list[str] = []


@dataclass(frozen=True)
class CacheEntryStats:
    """One executable of this process.

    `name` is the op or graph it was made for, `source` "compiled", "disk" or "remote",
    `compilation_duration` the time it took to compile or load, `read_count` how often it ran, and
    `last_read` when last (UTC; the epoch for never).
    """

    name: str
    source: str
    compilation_duration: timedelta
    last_read: datetime
    read_count: int


@dataclass(frozen=True)
class CacheStats:
    """The executables now held, oldest first, and look-ups in this process and those that hit."""

    per_entry_stats: list[CacheEntryStats]
    num_cache_reqs: int
    num_cache_hits: int


def _get_cache_stats() -> CacheStats:
    entries = [
        CacheEntryStats(
            name, source, timedelta(seconds=seconds), datetime.fromtimestamp(last, UTC), launches
        )
        for name, source, seconds, launches, last in _C.executables()
    ]
    return CacheStats(entries, _get_cache_requests(), _get_cache_hits())


def _get_cache_hits() -> int:
    """How often a program was found in this process."""
    return _C.stats()["hits"]


def _get_cache_misses() -> int:
    """How often a program was new to this process, whether it was then compiled or loaded."""
    return _C.stats()["misses"]


def _get_cache_requests() -> int:
    return _get_cache_hits() + _get_cache_misses()


def _clear_cache() -> None:
    """Drops the programs of this process; what is kept on disk stays (see ``python -m torch_tpu
    cache clear``)."""
    _C.clear_programs()
