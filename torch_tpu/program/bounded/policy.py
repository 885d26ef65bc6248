"""When a call gets a program for many sizes, and which of its numbers are sizes that change.

A network sees many shapes in its first step and then no new ones; nothing may get slower there. So
a size counts as changing only on evidence:

* a dim of an operand is padded already: an earlier bounded program made it, or the user said so;
* an op met the same operand (a weight, a cache) for the third time, with other sizes;
* a dim grew by 1 from call to call three times and nothing else changed: a list of keys that grows;
* an op without any of these met the third value of a dim, and other ops know its values as such.

Such a call is lowered for a few sizes and lifted (``lift.py``) to a program for all sizes up to the
next power of two. What cannot be lifted is compiled for its own sizes, as before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch_tpu.program import options as program_options
from torch_tpu.program.bounded.description import Call
from torch_tpu.program.bounded.expressions import Expression
from torch_tpu.program.bounded.guesses import (
    MAX_SYMBOLS,
    from_difference,
    from_known,
    from_padding,
)
from torch_tpu.program.bounded.layout import Unbounded
from torch_tpu.program.bounded.patterns import (
    SMALLEST_BOUND,
    Bounded,
    Bucket,
    Known,
    Lower,
    Pattern,
    bucket,
)

_MAX_FAMILIES = 4096
_MAX_PATTERNS = 8
_MAX_REFUSALS = 3

__all__ = ["SMALLEST_BOUND", "Bounded", "Bucket", "Known", "bounded_plan", "bucket", "clear"]


@dataclass
class Family:
    """Calls of one form."""

    patterns: list[Pattern] = field(default_factory=list)
    history: deque[tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=lambda: deque(maxlen=12)
    )
    refusals: int = 0
    reason: str = ""


_families: OrderedDict[Any, Family] = OrderedDict()
_lock = threading.RLock()
_changing: deque[int] = deque(maxlen=64)  # values lately seen of sizes that change


def _note_changing(values: Sequence[int]) -> None:
    _changing.extend(v for v in values if v not in _changing)


def clear() -> None:
    """Forget what was seen; for tests."""
    with _lock:
        _families.clear()
        _changing.clear()


def _family(key: Any) -> Family:
    if key in _families:
        _families.move_to_end(key)
        return _families[key]
    while len(_families) >= _MAX_FAMILIES:
        _families.popitem(last=False)
    return _families.setdefault(key, Family())


def bounded_plan(
    name: str,
    args: list[Any],
    storages: list[Any],
    n_ints: int,
    lower: Lower,
    *,
    known: Known | None = None,
) -> Bounded | None:
    """The plan of a program for many sizes, if this call is to have one.

    ``lower`` plans the program of a call for its own sizes; it may raise anything. ``known`` says
    which sizes change; without it evidence decides.
    """
    if not program_options.dynamic_shapes():
        return None
    call = Call(args, storages)
    form, numbers = call.flatten()
    with _lock:
        family = _family((name, form, n_ints, program_options.fingerprint()))
        for pattern in family.patterns:
            values = pattern.match(numbers)
            if values is not None:
                _note_changing(values)
                try:
                    return pattern.plan(call, values, n_ints, lower)
                except Unbounded as error:
                    family.reason = str(error)
                    return None
        plan = None
        if family.refusals < _MAX_REFUSALS and len(family.patterns) < _MAX_PATTERNS:
            plan = _new_pattern(family, call, tuple(numbers), n_ints, lower, known)
        if plan is None:
            family.history.append((tuple(numbers), tuple(s.token for s in storages)))
        return plan


def _new_pattern(
    family: Family,
    call: Call,
    numbers: tuple[int, ...],
    n_ints: int,
    lower: Lower,
    known: Known | None,
) -> Bounded | None:
    reason = ""
    for expressions in _guesses(family, call, numbers, known):
        pattern = Pattern(expressions)
        values = pattern.match(numbers) if 1 <= pattern.symbols <= MAX_SYMBOLS else None
        if values is None:
            continue
        pattern.buckets = [known.buckets.get(v, bucket) if known else bucket for v in values]
        try:
            plan = pattern.plan(call, values, n_ints, lower)
        except Unbounded as error:
            reason = str(error)
            continue
        family.patterns.append(pattern)
        _note_changing(values)
        return plan
    if reason:
        family.refusals += 1
        family.reason = reason
    return None


def _guesses(
    family: Family, call: Call, numbers: tuple[int, ...], known: Known | None
) -> Iterator[list[Expression]]:
    if known is not None:
        yield from from_known(call, numbers, known)
        return
    if any(spec.padded for spec in call.storages):
        yield from from_padding(call, numbers)
        return
    before = _evidence(family, call, numbers)
    found = None if before is None else from_difference(before, numbers)
    if found is not None:
        yield found


def _evidence(family: Family, call: Call, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
    """An earlier call that shows which numbers change."""
    tokens = tuple(s.token for s in call.storages)
    other = [(n, t) for n, t in family.history if n != numbers]
    shared = [n for n, t in other if any(a == c for a, c in zip(t, tokens, strict=True))]
    # A third value of each size: two operands of a layer may share a third one and differ in a
    # size (queries and keys of fewer heads), without anything that changes.
    if len(set(shared)) >= 2 and (found := from_difference(shared[-1], numbers)) is not None:
        pattern = Pattern(found)
        if pattern.symbols and all(
            len({n[place] for n in (*shared, numbers)}) >= 3 for place in pattern.places.values()
        ):
            return shared[-1]
    # Other sizes of one dim, the latest last; each value once.
    alike: dict[int, tuple[int, ...]] = {}
    now = -1
    for n, _ in other:
        pair = _one_value(n, numbers)
        if pair is not None and (now in (-1, pair[1])):
            now = pair[1]
            alike.pop(pair[0], None)
            alike[pair[0]] = n
    series = list(alike)
    if len(series) < 2:
        return None
    latest = [*series[-3:], now]
    grows = len(latest) == 4 and all(c - a == 1 for a, c in pairwise(latest))
    known = _is_known(now) or all(_is_known(v) for v in series[-2:])
    return alike[series[-1]] if grows or known else None


def _is_known(size: int) -> bool:
    """Whether it was lately seen as a size that changes, and is not one that dims often have."""
    return size % 8 != 0 and size > 8 and size in _changing


def _one_value(before: Sequence[int], now: Sequence[int]) -> tuple[int, int] | None:
    """(old, new) of the one size that differs between two calls, multiples of it aside."""
    pairs = {(a, c) for a, c in zip(before, now, strict=True) if a != c}
    if not pairs:
        return None
    a, c = min(pairs, key=lambda p: p[1])
    if a < 2 or c < 2 or any(x * c != y * a and x * c * c != y * a * a for x, y in pairs):
        return None
    return a, c
