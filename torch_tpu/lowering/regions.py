"""Builder operations that carry regions: reductions, windows, sorting, scatter, control flow."""

# A mixin of Builder, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.types import Operand, Value, int_array, int_list, tensor_type

Spec = tuple[Sequence[int], torch.dtype]
Body = Callable[..., Value | Sequence[Value]]


def lowest(dtype: torch.dtype) -> int | float | bool:
    """The identity of ``max``: -inf, the smallest integer or False."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> int | float | bool:
    """The identity of ``min``."""
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


class RegionMixin:
    """``kind`` names a binary combiner: add, mul, max, min, and, or."""

    def _combiner(self, kind: str) -> Callable[[Value, Value], Value]:
        return {
            "add": self.add,
            "mul": self.mul,
            "max": self.maximum,
            "min": self.minimum,
            "and": self.and_,
            "or": self.or_,
        }[kind]

    def identity(self, kind: str, dtype: torch.dtype) -> Value:
        value = {
            "add": lambda: 0,
            "mul": lambda: 1,
            "max": lambda: lowest(dtype),
            "min": lambda: highest(dtype),
            "and": lambda: True if dtype is torch.bool else -1,
            "or": lambda: 0,
        }[kind]()
        return self.constant(value, dtype)

    # -- reductions ------------------------------------------------------------------------

    def reduce(
        self,
        x: Value,
        kind: str,
        dims: Sequence[int],
        keepdim: bool = False,
        init: Operand | None = None,
    ) -> Value:
        """Reduce over ``dims`` with a named combiner; ``keepdim`` leaves size-1 dims."""
        dims = sorted(d % max(x.rank, 1) for d in dims)
        if x.rank == 0 or not dims:
            return x
        start = self.identity(kind, x.dtype) if init is None else self.as_value(init, x.dtype)
        combine = self.reduce_combiner(kind, x.dtype)
        stage = self._first_stage(x, dims) if self.target == "cpu" else None
        out, rest = x, dims
        if stage is not None:
            unit = self.identity(kind, x.dtype)
            out = self.reduce_general([x], [unit], [stage], lambda a, c: combine(a, c))[0]
            (out,) = self.optimization_barrier(out)
            rest = [d - (d > stage) for d in dims if d != stage]
        (out,) = self.reduce_general([out], [start], rest, lambda a, c: combine(a, c))
        if keepdim:
            return self.reshape(out, [1 if d in dims else n for d, n in enumerate(x.shape)])
        return out

    def reduce_combiner(self, kind: str, dtype: torch.dtype) -> Callable[[Value, Value], Value]:
        """XLA:CPU does not vectorise a NaN-propagating maximum; spelt as a select it does."""
        if self.target != "cpu" or kind not in ("max", "min") or not dtype.is_floating_point:
            return self._combiner(kind)
        beats = self.gt if kind == "max" else self.lt
        return lambda a, c: self.select(self.or_(beats(a, c), self.ne(a, a)), a, c)

    @staticmethod
    def _first_stage(x: Value, dims: Sequence[int]) -> int | None:
        """The dim to reduce alone before the others; None to reduce all at once.

        XLA:CPU runs a reduction over several dims as a scalar chain but over one inner dim as
        vector code, 3 to 15 times faster; a barrier keeps XLA from merging the two stages.
        """
        if len(dims) < 2 or x.numel < 1 << 14:
            return None
        inner = [d for d in dims if d != x.rank - 1 and x.shape[d] >= 4]
        return inner[-1] if inner else None

    def reduce_general(
        self, values: Sequence[Value], inits: Sequence[Value], dims: Sequence[int], body: Body
    ) -> tuple[Value, ...]:
        """Variadic reduction; ``body(*accumulators, *elements)`` gives the new accumulators."""
        first = values[0]
        dims = sorted(dims)
        shape = tuple(n for d, n in enumerate(first.shape) if d not in dims)
        region = self.nested([((), v.dtype) for v in [*values, *values]], body)
        names = ", ".join(v.name for v in [*values, *inits])
        types = ", ".join(v.type for v in [*values, *inits])
        outs = ", ".join(tensor_type(shape, v.dtype) for v in values)
        text = (
            f'"stablehlo.reduce"({names}) <{{dimensions = {int_array(dims)}}}> ({region}) '
            f": ({types}) -> ({outs})"
        )
        return self.emit_many(text, [(shape, v.dtype) for v in values])

    def reduce_window(
        self,
        values: Sequence[Value],
        inits: Sequence[Value],
        body: Body | str,
        *,
        window: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Sequence[tuple[int, int]] | None = None,
        base_dilation: Sequence[int] | None = None,
        window_dilation: Sequence[int] | None = None,
    ) -> tuple[Value, ...]:
        """Windowed reduction over every dim (window sizes include 1 for untouched dims)."""
        first = values[0]
        n = first.rank
        strides = list(strides or [1] * n)
        padding = list(padding or [(0, 0)] * n)
        base = list(base_dilation or [1] * n)
        dilation = list(window_dilation or [1] * n)
        shape = []
        for d in range(n):
            size = (first.shape[d] - 1) * base[d] + 1 if first.shape[d] else 0
            size += sum(padding[d])
            span = (window[d] - 1) * dilation[d] + 1
            shape.append(max(0, (size - span) // strides[d] + 1))
        if isinstance(body, str):
            combine = self._combiner(body)
            region = self.nested([((), first.dtype)] * 2, lambda a, c: combine(a, c))
        else:
            region = self.nested([((), v.dtype) for v in [*values, *values]], body)
        pads = ", ".join(f"[{lo}, {hi}]" for lo, hi in padding)
        attrs = (
            f"window_dimensions = {int_array(window)}, window_strides = {int_array(strides)}, "
            f"base_dilations = {int_array(base)}, window_dilations = {int_array(dilation)}, "
            f"padding = dense<[{pads}]> : tensor<{n}x2xi64>"
        )
        names = ", ".join(v.name for v in [*values, *inits])
        types = ", ".join(v.type for v in [*values, *inits])
        outs = ", ".join(tensor_type(shape, v.dtype) for v in values)
        text = (
            f'"stablehlo.reduce_window"({names}) <{{{attrs}}}> ({region}) : ({types}) -> ({outs})'
        )
        return self.emit_many(text, [(shape, v.dtype) for v in values])

    def select_and_scatter(
        self,
        x: Value,
        source: Value,
        init: Value,
        *,
        window: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
    ) -> Value:
        """Add ``source`` to the position of each window's maximum (first one on ties)."""
        select = self.nested([((), x.dtype)] * 2, lambda a, c: self.ge(a, c))
        scatter = self.nested([((), x.dtype)] * 2, lambda a, c: self.add(a, c))
        pads = ", ".join(f"[{lo}, {hi}]" for lo, hi in padding)
        attrs = (
            f"window_dimensions = {int_array(window)}, window_strides = {int_array(strides)}, "
            f"padding = dense<[{pads}]> : tensor<{x.rank}x2xi64>"
        )
        text = (
            f'"stablehlo.select_and_scatter"({x.name}, {source.name}, {init.name}) <{{{attrs}}}> '
            f"({select}, {scatter}) : ({x.type}, {source.type}, {init.type}) -> {x.type}"
        )
        return self.emit(text, x.shape, x.dtype)

    # -- sorting ---------------------------------------------------------------------------

    def sort(
        self, values: Sequence[Value], dim: int, less: Callable[..., Value], stable: bool = True
    ) -> tuple[Value, ...]:
        """Sort all values together along ``dim``; ``less(a0, b0, a1, b1, …)`` compares entries."""
        first = values[0]
        args = [((), v.dtype) for v in values for _ in range(2)]
        region = self.nested(args, less)
        names = ", ".join(v.name for v in values)
        types = ", ".join(v.type for v in values)
        text = (
            f'"stablehlo.sort"({names}) <{{dimension = {dim % first.rank} : i64, '
            f"is_stable = {'true' if stable else 'false'}}}> ({region}) : ({types}) -> ({types})"
        )
        return self.emit_many(text, [(v.shape, v.dtype) for v in values])

    def total_less(self, a: Value, c: Value, descending: bool = False) -> Value:
        """Strict order for sorting in PyTorch's sense: NaN is the largest value."""
        if descending:
            a, c = c, a
        if not a.is_float:
            return self.lt(a, c)
        return self.or_(self.lt(a, c), self.and_(self.eq(a, a), self.ne(c, c)))

    # -- gather and scatter ----------------------------------------------------------------

    def gather(
        self,
        x: Value,
        indices: Value,
        *,
        offset_dims: Sequence[int],
        collapsed: Sequence[int],
        start_index_map: Sequence[int],
        index_vector_dim: int,
        slice_sizes: Sequence[int],
        operand_batching: Sequence[int] = (),
        indices_batching: Sequence[int] = (),
        sorted_indices: bool = False,
    ) -> Value:
        """StableHLO gather. Indices are clamped by XLA: check or wrap them before."""
        batch = [n for d, n in enumerate(indices.shape) if d != index_vector_dim]
        window = [
            n for d, n in enumerate(slice_sizes) if d not in collapsed and d not in operand_batching
        ]
        rank = len(batch) + len(window)
        shape = [0] * rank
        rest = iter(batch)
        sizes = iter(window)
        for d in range(rank):
            shape[d] = next(sizes) if d in offset_dims else next(rest)
        fields = [
            f"offset_dims = {int_list(offset_dims)}" if offset_dims else "",
            f"collapsed_slice_dims = {int_list(collapsed)}" if collapsed else "",
            f"operand_batching_dims = {int_list(operand_batching)}" if operand_batching else "",
            f"start_indices_batching_dims = {int_list(indices_batching)}"
            if indices_batching
            else "",
            f"start_index_map = {int_list(start_index_map)}" if start_index_map else "",
            f"index_vector_dim = {index_vector_dim}",
        ]
        numbers = ", ".join(f for f in fields if f)
        out = tensor_type(shape, x.dtype)
        text = (
            f'"stablehlo.gather"({x.name}, {indices.name}) <{{dimension_numbers = '
            f"#stablehlo.gather<{numbers}>, slice_sizes = {int_array(slice_sizes)}, "
            f"indices_are_sorted = {'true' if sorted_indices else 'false'}}}> "
            f": ({x.type}, {indices.type}) -> {out}"
        )
        return self.emit(text, shape, x.dtype)

    def scatter(
        self,
        x: Value,
        indices: Value,
        updates: Value,
        body: Body | str,
        *,
        update_window_dims: Sequence[int],
        inserted: Sequence[int],
        scatter_dims: Sequence[int],
        index_vector_dim: int,
        operand_batching: Sequence[int] = (),
        indices_batching: Sequence[int] = (),
        unique: bool = False,
        sorted_indices: bool = False,
    ) -> Value:
        """StableHLO scatter; body "set", a named combiner or a function (current, update).

        Updates out of bounds are dropped: check or wrap indices before.
        """
        if body == "set":
            region = self.nested([((), x.dtype)] * 2, lambda a, c: c)
        elif isinstance(body, str):
            combine = self._combiner(body)
            region = self.nested([((), x.dtype)] * 2, lambda a, c: combine(a, c))
        else:
            region = self.nested([((), x.dtype)] * 2, body)
        fields = [
            f"update_window_dims = {int_list(update_window_dims)}" if update_window_dims else "",
            f"inserted_window_dims = {int_list(inserted)}" if inserted else "",
            f"input_batching_dims = {int_list(operand_batching)}" if operand_batching else "",
            f"scatter_indices_batching_dims = {int_list(indices_batching)}"
            if indices_batching
            else "",
            f"scatter_dims_to_operand_dims = {int_list(scatter_dims)}" if scatter_dims else "",
            f"index_vector_dim = {index_vector_dim}",
        ]
        numbers = ", ".join(f for f in fields if f)
        flags = (
            f"indices_are_sorted = {'true' if sorted_indices else 'false'}, "
            f"unique_indices = {'true' if unique else 'false'}"
        )
        text = (
            f'"stablehlo.scatter"({x.name}, {indices.name}, {updates.name}) '
            f"<{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, {flags}}}> ({region}) "
            f": ({x.type}, {indices.type}, {updates.type}) -> {x.type}"
        )
        return self.emit(text, x.shape, x.dtype)

    def take_rows(self, x: Value, rows: Value) -> Value:
        """``x[rows]`` along dim 0 for in-range integer ``rows`` of any shape."""
        n = rows.rank
        return self.gather(
            x,
            rows,
            offset_dims=range(n, n + x.rank - 1),
            collapsed=[0],
            start_index_map=[0],
            index_vector_dim=n,
            slice_sizes=[1, *x.shape[1:]],
        )

    def take_along(self, x: Value, dim: int, index: Value) -> Value:
        """``x.gather(dim, index)`` for in-range indices; other dims of ``index`` may be smaller."""
        dim %= x.rank
        parts = [
            index if d == dim else self.iota(index.shape, d, index.dtype) for d in range(x.rank)
        ]
        where = self.stack(parts, index.rank)
        return self.gather(
            x,
            where,
            offset_dims=[],
            collapsed=range(x.rank),
            start_index_map=range(x.rank),
            index_vector_dim=index.rank,
            slice_sizes=[1] * x.rank,
        )

    # -- control flow ----------------------------------------------------------------------

    def while_(self, inits: Sequence[Value], condition: Body, body: Body) -> tuple[Value, ...]:
        """Loop ``state = body(*state)`` while ``condition(*state)`` (an i1 scalar) holds.

        Everything the regions read must be part of the state or created inside.
        """
        specs = [(v.shape, v.dtype) for v in inits]
        first = self.nested(specs, condition)
        second = self.nested(specs, body)
        names = ", ".join(v.name for v in inits)
        types = ", ".join(v.type for v in inits)
        text = f'"stablehlo.while"({names}) ({first}, {second}) : ({types}) -> ({types})'
        return self.emit_many(text, specs)

    def fori(
        self, count: int, inits: Sequence[Value], body: Callable[..., Sequence[Value]]
    ) -> tuple[Value, ...]:
        """``for i in range(count): state = body(i, *state)`` with an i64 scalar ``i``.

        The counter itself is i32: on a TPU an i64 is two words, in which the compiler finds no
        trip count.
        """
        start = self.constant(0, torch.int32)

        def step(i: Value, *state: Value) -> list[Value]:
            return [self.add(i, 1), *body(self.convert(i, torch.int64), *state)]

        return self.while_([start, *inits], lambda i, *_: self.lt(i, count), step)[1:]

    def if_(
        self, condition: Value, then: Body, otherwise: Body, specs: Sequence[Spec]
    ) -> tuple[Value, ...]:
        """Branch on an i1 scalar; branches take no arguments and may read outer values."""
        a, c = self.nested([], then), self.nested([], otherwise)
        outs = ", ".join(tensor_type(s, d) for s, d in specs)
        text = f'"stablehlo.if"({condition.name}) ({a}, {c}) : ({condition.type}) -> ({outs})'
        return self.emit_many(text, specs)
