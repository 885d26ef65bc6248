"""A call's form with expressions for its numbers, and the programs for all its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_tpu.program.bounded.description import Call
from torch_tpu.program.bounded.expressions import Expression, fit
from torch_tpu.program.bounded.layout import Unbounded
from torch_tpu.program.bounded.lift import Lift, read, structure
from torch_tpu.program.bounded.text import Function
from torch_tpu.program.plan import Output, Plan

SMALLEST_BOUND = 16

Lower = Callable[[Call], Plan]


def bucket(size: int, smallest: int = SMALLEST_BOUND) -> int:
    """The bound for a size: the next power of two, at least ``smallest``."""
    return max(smallest, 1 << (size - 1).bit_length())


# The bound for a size.
Bucket = Callable[[int], int]


@dataclass(frozen=True)
class Known:
    """What a tracer knows of a call: its symbols' values, their bounds by value, and the numbers of
    its arguments (without those of bases) as expressions."""

    values: tuple[int, ...]
    buckets: Mapping[int, Bucket]
    numbers: Sequence[Expression]


@dataclass(frozen=True)
class Bounded:
    """A plan, and what to tell about it if its program is a new one."""

    plan: Plan
    report: dict[str, Any] | None = None


@dataclass
class _Lifted:
    """What is known of a pattern's program for some bounds: samples and the texts made of them."""

    points: list[tuple[int, ...]]
    functions: list[Function]
    plan: Plan  # one of the samples'
    outputs: list[tuple[list[Expression], list[Expression], list[Expression]]]
    values: list[Expression]  # the numbers of a graph's results, in order
    texts: dict[Any, str] = field(default_factory=dict)


class Pattern:
    """A form whose numbers are expressions of symbols."""

    def __init__(self, expressions: Sequence[Expression], buckets: Sequence[Bucket] = ()) -> None:
        # Symbols of a guess that no number depends on are left out.
        used = sorted({s for e in expressions for m, _ in e.terms for s in m})
        self.expressions = [
            Expression.of({tuple(used.index(s) for s in m): c for m, c in e.terms})
            for e in expressions
        ]
        self.buckets = buckets
        self.places: dict[int, int] = {}  # symbol → where its value stands
        for place, expression in enumerate(self.expressions):
            found = expression.multiple_of_one
            if found is not None and found[1] == 1:
                self.places.setdefault(found[0], place)
        # 0 if a symbol's value stands nowhere.
        self.symbols = len(used) if len(self.places) == len(used) else 0
        self._lifted: dict[Any, _Lifted | str] = {}

    def match(self, numbers: Sequence[int]) -> tuple[int, ...] | None:
        """The symbols' values in a call of these numbers."""
        values = tuple(numbers[self.places[s]] for s in range(self.symbols))
        if min(values) < 2:
            return None
        for expression, number in zip(self.expressions, numbers, strict=True):
            if expression.at(values) != number:
                return None
        return values

    def plan(self, call: Call, values: tuple[int, ...], n_ints: int, lower: Lower) -> Bounded:
        """The plan for a call; Unbounded if there is no program for many sizes."""
        bases = self._bases(call)
        bounds = self._bounds(call, bases, values)
        paddings: list[tuple[int, ...] | None] = []
        repads: list[tuple[int, tuple[int, ...]]] = []
        for k, (spec, dims) in enumerate(zip(call.storages, bases, strict=True)):
            wanted = tuple(0 if e.is_constant else e.at(bounds) for e in dims)
            have = spec.padded or (0,) * len(wanted)
            if 0 in spec.dims and any(wanted):
                raise Unbounded("an operand without elements")
            if spec.can_pad and any(w and not h for w, h in zip(wanted, have, strict=True)):
                if not spec.dims:
                    raise Unbounded("a scalar that is padded")
                repads.append((k, tuple(w or h for w, h in zip(wanted, have, strict=True))))
            paddings.append(spec.padded)
        if repads:
            return Bounded(Plan(repads=repads))
        key = (bounds, tuple(paddings))
        lifted = self._lifted.get(key)
        if isinstance(lifted, str):
            raise Unbounded(lifted)
        if lifted is None:
            try:
                lifted = self._sample(call, values, bounds, paddings, lower)
            except Unbounded as error:
                self._lifted[key] = str(error)
                raise
            self._lifted[key] = lifted
        try:
            return self._instantiate(call, lifted, values, bounds, n_ints)
        except Unbounded as error:
            self._lifted[key] = str(error)
            raise

    def _bases(self, call: Call) -> list[list[Expression]]:
        return [[self.expressions[p] for p in places] for places in call.storage_places()]

    def _bounds(
        self, call: Call, bases: list[list[Expression]], values: tuple[int, ...]
    ) -> tuple[int, ...]:
        """What each symbol may grow to: as far as the operands are padded, else its bucket."""
        room: dict[int, int] = {}
        for spec, dims in zip(call.storages, bases, strict=True):
            for padded, size in zip(spec.padded or (), dims, strict=False):
                found = size.multiple_of_one
                if padded and found is not None:
                    symbol, factor = found
                    room[symbol] = min(room.get(symbol, padded // factor), padded // factor)
        bounds = []
        for k, v in enumerate(values):
            if k not in room:
                room[k] = self.buckets[k](v) if k < len(self.buckets) else bucket(v)
            bounds.append(room[k])
        for spec, dims in zip(call.storages, bases, strict=True):
            for padded, size in zip(spec.padded or (), dims, strict=False):
                if padded and size.at(bounds) > padded:
                    raise Unbounded(f"an operand padded to {padded} only")
        if any(v > n for v, n in zip(values, bounds, strict=True)):
            raise Unbounded("an operand padded to less than its size")
        return tuple(bounds)

    def _sample(
        self,
        call: Call,
        values: tuple[int, ...],
        bounds: tuple[int, ...],
        paddings: Sequence[Any],
        lower: Lower,
    ) -> _Lifted:
        """Lowers the call for the ends of the bucket, its middle and its own sizes."""
        points: list[tuple[int, ...]] = []
        plans: list[Plan] = []
        functions: list[Function] = []
        refused: list[str] = []

        def take(point: tuple[int, ...]) -> None:
            if point in points or any(not 2 <= v <= n for v, n in zip(point, bounds, strict=True)):
                return
            numbers = [e.at(point) for e in self.expressions]
            other = call.with_numbers(numbers, paddings)
            if not other.is_possible():
                return
            try:
                plan = lower(other)
            except Exception as error:
                if point == values:
                    raise
                refused.append(f"{point}: {error}")
                return
            if not plan.text or plan.resizes:
                raise Unbounded("an op that computes nothing")
            points.append(point)
            plans.append(plan)
            functions.append(read(plan.text))

        take(values)
        count = len(values)

        def spread(end: tuple[int, ...]) -> None:
            for s in range(count):
                take(tuple(end[k] if k == s else v for k, v in enumerate(values)))
            take(end)

        def chosen() -> list[int]:
            """The samples of the structure that most of them have."""
            alike: dict[Any, list[int]] = {}
            for k in range(len(points)):
                alike.setdefault(structure(functions[k]), []).append(k)
            return max(alike.values(), key=len)

        high = bounds, tuple(max(n - 1, 2) for n in bounds)
        first = [n // 2 + 1 if n > SMALLEST_BOUND else 2 for n in bounds]
        low = tuple(first), tuple(n + 1 for n in first)
        spread(high[0])
        spread(low[0])
        if count == 1:
            take(tuple(3 * n // 4 for n in bounds))
        for distance in (1, -1, 2, -2, 3):
            if len(points) >= count + 3:
                break
            for s in range(count):
                take(tuple(v + distance * (k == s) for k, v in enumerate(values)))
        because = f" ({refused[0]})" if refused else ""
        if not points:
            raise Unbounded(f"its views follow no rule{because}")
        # At one size a program may leave something out, because the size happens to equal another.
        # So each end gets a second chance.
        for ends in (high, low):
            if ends[0] in points and ends[0] not in [points[k] for k in chosen()]:
                spread(ends[1])
                if ends[1] in points and ends[1] not in [points[k] for k in chosen()]:
                    raise Unbounded("other operations for other sizes")
        kept = chosen()
        if len(kept) < count + 2:
            raise Unbounded(f"too few sizes that it is right for{because}")
        points = [points[k] for k in kept]
        plans = [plans[k] for k in kept]
        functions = [functions[k] for k in kept]
        sample = plans[0]
        for plan in plans[1:]:
            same = all(
                getattr(plan, name) == getattr(sample, name)
                for name in (
                    "parameters", "takes_ints", "takes_floats", "takes_rng", "checks",
                    "returns", "resizes", "options", "draws",
                )
                if hasattr(sample, name)
            )  # fmt: skip
            if not same or [_kind(o) for o in plan.outputs] != [_kind(o) for o in sample.outputs]:
                raise Unbounded("other results for other sizes")
        outputs = []
        for k in range(len(sample.outputs)):
            rows = [plan.outputs[k] for plan in plans]
            outputs.append(
                (
                    _fitted([o.sizes for o in rows], points),
                    _fitted([o.strides for o in rows], points),
                    _fitted([o.base for o in rows], points),
                )
            )
        values_of = [_value_numbers(plan) for plan in plans]
        if len({len(v) for v in values_of}) > 1:
            raise Unbounded("other results for other sizes")
        return _Lifted(points, functions, sample, outputs, _fitted(values_of, points))

    def _instantiate(
        self,
        call: Call,
        lifted: _Lifted,
        values: tuple[int, ...],
        bounds: tuple[int, ...],
        n_ints: int,
    ) -> Bounded:
        first = lifted.plan
        targets: list[tuple[int, ...] | None] = []
        outputs: list[Output] = []
        donations: dict[int, int] = {}
        storage_of = {arg.index: storage for arg, storage, _ in call.tensors()}
        for k, (output, (sizes, strides, base)) in enumerate(
            zip(first.outputs, lifted.outputs, strict=True)
        ):
            padded: tuple[int, ...] | None = None
            donates = output.donates
            if not all(e.is_constant for e in base):
                padded = tuple(_target(e, values, bounds) for e in base)
                spec = call.storages[storage_of[output.target]] if output.target >= 0 else None
                if spec is not None and spec.padded:  # written in place: as its base was
                    padded = spec.padded
                    if spec.dtype is output.base_dtype:
                        storage = storage_of[output.target]
                        if storage in first.parameters:
                            donates = first.parameters.index(storage)
            if donates >= 0:
                donations[donates] = k
            real = tuple(e.at(values) for e in base)
            outputs.append(
                replace(
                    output,
                    sizes=tuple(e.at(values) for e in sizes),
                    strides=tuple(e.at(values) for e in strides),
                    base=real,
                    padded=padded,
                    donates=donates,
                )
            )
            if padded is not None:
                targets.append(tuple(p or n for p, n in zip(padded, real, strict=True)))
            else:
                targets.append(real)
        key = tuple(targets)
        report = None
        if key not in lifted.texts:
            try:
                lifted.texts[key] = Lift(
                    lifted.functions,
                    lifted.points,
                    bounds,
                    first_size=n_ints + (2 if first.takes_rng else 0),
                    targets=targets,
                    donations=donations,
                ).text()
            except Unbounded:
                raise
            except Exception as error:
                # The call itself is fine, and there is a program for its own sizes.
                raise Unbounded(f"internal error: {type(error).__name__}: {error}") from error
            report = {
                f"size {k} up to": f"{n} (any size from 2 on)" for k, n in enumerate(bounds)
            } | {f"padding of result {k}": t for k, t in enumerate(targets)}
        plan = replace(
            first,
            text=lifted.texts[key],
            takes_ints=True,
            outputs=outputs,
            dynamic_sizes=list(values),
        )
        if lifted.values:
            plan = _with_value_numbers(plan, [e.at(values) for e in lifted.values])
        return Bounded(plan, report)


def _value_numbers(plan: Plan) -> list[int]:
    """The sizes in what a graph returns (GraphProgram.values)."""
    numbers: list[int] = []
    for value in getattr(plan, "values", ()):
        numbers += [*value.sizes, *value.strides, value.offset]
        if isinstance(value.value, int) and not isinstance(value.value, bool):
            numbers.append(value.value)
    return numbers


def _with_value_numbers(plan: Plan, numbers: Sequence[int]) -> Plan:
    feed = iter(numbers)
    values = []
    for value in plan.values:  # type: ignore[attr-defined]
        sizes = tuple(next(feed) for _ in value.sizes)
        strides = tuple(next(feed) for _ in value.strides)
        offset = next(feed)
        number = value.value
        if isinstance(number, int) and not isinstance(number, bool):
            number = next(feed)
        values.append(replace(value, sizes=sizes, strides=strides, offset=offset, value=number))
    return replace(plan, values=values)  # type: ignore[call-arg]


def _kind(output: Output) -> Any:
    return (
        *(output.target, output.dtype, output.base_dtype),
        *(len(output.sizes), len(output.base)),
    )


def _fitted(rows: Sequence[Sequence[int]], points: Sequence[Sequence[int]]) -> list[Expression]:
    out = []
    for values in zip(*rows, strict=True):
        found = fit(values, points)
        if found is None:
            raise Unbounded("a result whose size follows no rule")
        out.append(found)
    return out


def _target(size: Expression, values: Sequence[int], bounds: Sequence[int]) -> int:
    """The padded size of a result's dim; 0 where the size never changes."""
    if size.is_constant:
        return 0
    if size.multiple_of_one is not None:
        return size.at(bounds)
    linear = [m for m, _ in size.terms if m]
    if len(linear) == 1 and len(linear[0]) == 1 and dict(size.terms)[linear[0]] == 1:
        return bucket(size.at(values))  # n + 1: as whatever takes it next will have it
    return size.at(bounds)
