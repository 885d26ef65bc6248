"""Operations that move places: which of their results' places are real."""

# Mixins of lift.Lift, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_tpu.lowering.types import Operand, Value
from torch_tpu.program.bounded.expressions import Expression
from torch_tpu.program.bounded.layout import Dim, Factor, Padded, Unbounded
from torch_tpu.program.bounded.text import Line, integers


class ShapeRules:
    """Rules for reshape, broadcast, transpose, slices, pads, concatenation and reversal."""

    def _reshape(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        return self.sizes.reshaped(operands[0], self.shape(lines))

    def _broadcast_in_dim(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        self._same_attributes(lines)
        (x,) = operands
        sizes = self.shape(lines)
        where = integers(lines[0].attributes, "dims")
        dims = [replace(self.sizes.dim(s), uniform=True) for s in sizes]
        one = Expression.constant(1)
        for k, d in enumerate(where):
            if x.dims[k].size == sizes[d]:
                dims[d] = x.dims[k]
            elif x.dims[k].size != one:
                raise Unbounded("a broadcast of a size that changes")
        shape = [d.bound for d in dims]
        return Padded(self.b.broadcast_in_dim(x.value, shape, where), tuple(dims))

    def _transpose(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        self._same_attributes(lines)
        (x,) = operands
        order = integers(lines[0].attributes, "dims")
        return Padded(self.b.transpose(x.value, order), tuple(x.dims[d] for d in order))

    def _slice(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        (x,) = operands
        ranges = []
        for line in lines:
            inner = re.search(r"\[(.*)\]", line.attributes).group(1)  # type: ignore[union-attr]
            parts = [[int(n) for n in p.split(":")] for p in inner.split(", ")] if inner else []
            ranges.append([p if len(p) == 3 else [*p, 1] for p in parts])
        sizes = self.shape(lines)
        for d in range(len(x.dims)):
            start, limit, step = (self.fitted([r[d][k] for r in ranges]) for k in range(3))
            x = self._slice_dim(x, d, start, limit, step, sizes[d])
        return x

    def _slice_dim(
        self,
        x: Padded,
        d: int,
        start: Expression,
        limit: Expression,
        step: Expression,
        size: Expression,
    ) -> Padded:
        dim = x.dims[d]
        if start == Expression.constant(0) and limit == dim.size and step == Expression.constant(1):
            return x
        if not step.is_constant:
            raise Unbounded("a slice whose step changes")
        if dim.padded:
            x = self.sizes.arranged(x, d, dim.as_prefix() if not dim.is_prefix else dim)
        stride = step.at(())
        wanted = self.sizes.dim(size)
        have = x.value.shape[d]
        b = self.b
        if start.is_constant and start.at(()) >= 0:
            first = start.at(())
            last = first + (wanted.bound - 1) * stride + 1
            value = x.value
            if last > have:
                value = b.pad_dim(value, d, False if value.is_bool else 0, 0, last - have)
            value = b.slice_dim(value, d, first, last, stride)
        else:
            if stride != 1:
                raise Unbounded("a stepped slice whose start changes")
            value = self._window(x.value, d, self.sizes.real(start), wanted.bound)
        return Padded(value, (*x.dims[:d], wanted, *x.dims[d + 1 :]))

    def _window(self, value: Value, d: int, start: Operand, length: int) -> Value:
        """``length`` places from ``start`` on, which may reach beyond the end."""
        b = self.b
        long = b.pad_dim(value, d, False if value.is_bool else 0, 0, length)
        starts: list[Operand] = [0] * value.rank
        starts[d] = self.sizes.as_value(start)
        shape = [*value.shape[:d], length, *value.shape[d + 1 :]]
        return b.dynamic_slice(long, starts, shape)

    def _dynamic_slice(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        x, *starts = operands
        sizes = self.shape(lines)
        b = self.b
        value = x.value
        dims: list[Dim] = []
        for d, size in enumerate(sizes):
            if x.dims[d].padded and not x.dims[d].is_prefix:
                if x.dims[d].size == size:
                    dims.append(x.dims[d])
                    continue
                x = self.sizes.arranged(x, d, x.dims[d].as_prefix())
                value = x.value
            if x.dims[d].size == size:  # all of it: the start is 0
                dims.append(x.dims[d])
                continue
            wanted = self.sizes.dim(size)
            if wanted.padded or x.dims[d].padded:
                # The window of the bound may reach beyond the end, which would move its start.
                value = b.pad_dim(value, d, False if value.is_bool else 0, 0, wanted.bound)
            dims.append(wanted)
        shape = [d.bound for d in dims]
        places = [
            0 if value.shape[d] == n else s.value
            for d, (n, s) in enumerate(zip(shape, starts, strict=True))
        ]
        return Padded(b.dynamic_slice(value, places, shape), tuple(dims))

    def _dynamic_update_slice(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        x, update, *starts = operands
        b = self.b
        if not update.padded and not x.padded:
            return Padded(
                b.dynamic_update_slice(x.value, update.value, [s.value for s in starts]), x.dims
            )
        # Beyond the real places of the update the old contents stay. Both are made longer by the
        # update's bound, so that no window is moved.
        value, new = x, update
        moving = [d for d in range(len(x.dims)) if update.dims[d].size != x.dims[d].size]
        for d in range(len(x.dims)):
            if d in moving:
                for y in (value, new):
                    if y.dims[d].padded and not y.dims[d].is_prefix:
                        raise Unbounded("a write across padding")
            elif value.dims[d].factors != new.dims[d].factors:
                new = self.sizes.arranged(new, d, value.dims[d])
        long = value.value
        for d in moving:
            if new.dims[d].padded or value.dims[d].padded:
                fill = False if long.is_bool else 0
                long = b.pad_dim(long, d, fill, 0, new.dims[d].bound)
        zero = b.constant(0, torch.int64)
        places: list[Operand] = [s.value if d in moving else zero for d, s in enumerate(starts)]
        old = b.dynamic_slice(long, places, new.value.shape)
        inside: Value | None = None
        for d in range(len(x.dims)):
            if new.dims[d].padded and d in moving:
                one = b.broadcast_in_dim(self.sizes.valid(new.dims[d]), new.value.shape, [d])
                inside = one if inside is None else b.and_(inside, one)
        block = b.select(inside, new.value, old) if inside is not None else new.value
        out = b.dynamic_update_slice(long, block, places)
        if out.shape != x.value.shape:
            out = b.slice(out, [0] * out.rank, x.value.shape)
        return Padded(out, x.dims)

    def _pad(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        x, fill = operands
        b = self.b
        low, high, interior = (self.attribute(lines, n) for n in ("low", "high", "interior"))
        zero = Expression.constant(0)
        sizes = self.shape(lines)
        for d in range(len(x.dims)):
            if low[d] == zero and high[d] == zero and interior[d] == zero:
                continue
            dim = x.dims[d]
            if not dim.is_prefix:
                x = self.sizes.arranged(x, d, dim.as_prefix())
                dim = x.dims[d]
            if not interior[d].is_constant or not low[d].is_constant:
                raise Unbounded("padding whose start changes")
            lo, between = low[d].at(()), interior[d].at(())
            wanted = self.sizes.dim(sizes[d])
            value = self.sizes.masked(x, [d], fill.value)
            have = value.shape[d]
            length = have + max(have - 1, 0) * between
            lows, highs, inner = ([0] * value.rank for _ in range(3))
            lows[d], inner[d] = lo, between
            highs[d] = wanted.bound - length - lo
            value = b.pad(value, fill.value, lows, highs, inner)
            x = Padded(value, (*x.dims[:d], wanted, *x.dims[d + 1 :]))
            if wanted.padded and between:
                continue  # what follows the last element is the fill already
        return x

    def _concatenate(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        (d,) = {integers(line.attributes, "dim")[0] for line in lines}
        b = self.b
        values = list(operands)
        for k in range(len(values[0].dims)):
            if k == d:
                continue
            shaped = [x.dims[k] for x in values if not x.dims[k].uniform]
            wanted = max(shaped or [values[0].dims[k]], key=lambda dim: len(dim.factors))
            values = [self.sizes.arranged(x, k, wanted) for x in values]
        if not any(x.dims[d].padded for x in values[:-1]) and values[-1].dims[d].is_prefix:
            value = b.concatenate([x.value for x in values], d)
        else:
            values = [
                x if x.dims[d].is_prefix else self.sizes.arranged(x, d, x.dims[d].as_prefix())
                for x in values
            ]
            total = sum(x.value.shape[d] for x in values)
            first = values[0].value
            fill = False if first.is_bool else 0
            value = b.pad_dim(first, d, fill, 0, total - first.shape[d])
            start = values[0].dims[d].size
            for x in values[1:]:  # each over what the one before left beyond its end
                places: list[Operand] = [b.constant(0, torch.int64)] * value.rank
                places[d] = self.sizes.as_value(self.sizes.real(start))
                value = b.dynamic_update_slice(value, x.value, places)
                start = start + x.dims[d].size
        size = values[0].dims[d].size
        for x in values[1:]:
            size = size + x.dims[d].size
        joined = Dim((Factor(value.shape[d], size),))
        dims = [*values[0].dims[:d], joined, *values[0].dims[d + 1 :]]
        dims = [replace(dim, uniform=False) for dim in dims]
        return Padded(value, tuple(dims))

    def _reverse(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        self._same_attributes(lines)
        (x,) = operands
        for d in integers(lines[0].attributes, "dims"):
            dim = x.dims[d]
            if not dim.is_prefix:
                x = self.sizes.arranged(x, d, dim.as_prefix())
            turned = self.b.reverse(x.value, [d])
            if x.dims[d].padded:  # the padding came to the front
                gap = Expression.constant(x.dims[d].bound) - x.dims[d].size
                turned = self._window(turned, d, self.sizes.real(gap), x.dims[d].bound)
            x = Padded(turned, x.dims)
        return x
