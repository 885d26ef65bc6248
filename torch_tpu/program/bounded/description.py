"""A call as a form with numbers in it: what stays when sizes change, and the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_tpu.lowering import views
from torch_tpu.program.emitter import contiguous_strides
from torch_tpu.program.plan import ScalarArg, StorageSpec, TensorArg


@dataclass(frozen=True)
class Call:
    """The arguments of one call as the native core describes them (program/plan.py)."""

    args: list[Any]
    storages: list[StorageSpec]

    def flatten(self) -> tuple[Any, list[int]]:
        """(form, numbers): the form is hashable, and the same for calls that differ in numbers."""
        numbers: list[int] = []

        def walk(value: Any) -> Any:
            if isinstance(value, TensorArg):
                numbers.extend(value.sizes)
                if value.view in (views.REGULAR, views.GATHER):
                    numbers.extend(value.strides)
                return (
                    *("tensor", value.index, value.storage, len(value.sizes), value.dtype),
                    *(value.view, value.first, value.count, value.wrapped),
                )
            if isinstance(value, ScalarArg):
                return ("number", value.kind, value.slot)
            if isinstance(value, (list, tuple)):
                return ("list", *(walk(v) for v in value))
            if isinstance(value, int) and not isinstance(value, bool):
                numbers.append(value)
                return int
            try:
                hash(value)
            except TypeError:
                return repr(value)
            return (type(value), value)

        form = [walk(a) for a in self.args]
        for spec in self.storages:
            numbers.extend(spec.dims)
            form.append((spec.dtype, len(spec.dims)))
        return tuple(form), numbers

    def tensors(self) -> list[tuple[TensorArg, int, int]]:
        """(tensor, storage, place of its sizes among the numbers), for those on the device."""
        found: list[tuple[TensorArg, int, int]] = []
        at = 0

        def walk(value: Any) -> None:
            nonlocal at
            if isinstance(value, TensorArg):
                n = len(value.sizes) * (2 if value.view in (views.REGULAR, views.GATHER) else 1)
                if value.storage >= 0:
                    found.append((value, value.storage, at))
                at += n
            elif isinstance(value, (list, tuple)):
                for v in value:
                    walk(v)
            elif isinstance(value, int) and not isinstance(value, bool):
                at += 1

        walk(self.args)
        return found

    def tensor_places(self) -> list[tuple[int, int]]:
        """(place, storage) of the numbers that belong to tensors on the device."""
        places: list[tuple[int, int]] = []
        for arg, storage, at in self.tensors():
            n = len(arg.sizes) * (2 if arg.view in (views.REGULAR, views.GATHER) else 1)
            places.extend((at + k, storage) for k in range(n))
        return places

    def storage_places(self) -> list[range]:
        """Where the dims of each storage stand among the numbers."""
        _, numbers = self.flatten()
        end = len(numbers)
        places = []
        for spec in reversed(self.storages):
            places.append(range(end - len(spec.dims), end))
            end -= len(spec.dims)
        return places[::-1]

    def with_numbers(self, numbers: Sequence[int], paddings: Sequence[Any]) -> Call:
        """The same form with other numbers; ``paddings`` are the bases' padded shapes or None."""
        feed = iter(numbers)

        def take(n: int) -> tuple[int, ...]:
            return tuple(next(feed) for _ in range(n))

        def walk(value: Any) -> Any:
            if isinstance(value, TensorArg):
                sizes = take(len(value.sizes))
                if value.view in (views.REGULAR, views.GATHER):
                    strides = take(len(sizes))
                else:
                    strides = contiguous_strides(sizes)
                return replace(value, sizes=sizes, strides=strides)
            if isinstance(value, (list, tuple)):
                return [walk(v) for v in value]
            if isinstance(value, int) and not isinstance(value, bool):
                return next(feed)
            return value

        args = [walk(a) for a in self.args]
        storages = [
            replace(spec, dims=take(len(spec.dims)), padded=padded)
            for spec, padded in zip(self.storages, paddings, strict=True)
        ]
        return Call(args, storages)

    def is_possible(self) -> bool:
        """Whether every view lies in its base, with as many moving starts as it has operands."""
        fits = True

        def walk(value: Any) -> None:
            nonlocal fits
            if isinstance(value, TensorArg) and value.storage >= 0:
                fits = fits and _fits(value, self.storages[value.storage])
            elif isinstance(value, (list, tuple)):
                for v in value:
                    walk(v)

        walk(self.args)
        return fits


def _fits(arg: TensorArg, spec: StorageSpec) -> bool:
    numel = spec.numel * spec.dtype.itemsize // arg.dtype.itemsize
    count = 1
    for n in arg.sizes:
        count *= n
    if arg.view == views.EMPTY:
        return count == 0
    if count == 0:
        return False
    if arg.view == views.WHOLE:
        return arg.sizes == spec.dims
    if arg.view == views.RESHAPE:
        return count == numel and arg.sizes != spec.dims
    reach = sum((n - 1) * s for n, s in zip(arg.sizes, arg.strides, strict=True))
    if reach >= numel:
        return False
    if arg.view != views.REGULAR:
        return True
    levels = views._levels(arg.sizes, arg.strides, numel)
    if any(level.size > level.rows or level.stride > level.length for level in levels):
        return False
    moving = sum(level.size < level.rows for level in levels)
    last = levels[-1].stride if levels else numel
    return moving + (last > 1) == arg.count
