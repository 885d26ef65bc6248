"""Operations that mix places, which must not see those that are not real."""

# Mixins of lift.Lift, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torch_tpu.lowering.types import int_array, tensor_type
from torch_tpu.program.bounded.expressions import Expression
from torch_tpu.program.bounded.layout import Dim, Padded, Unbounded, fixed
from torch_tpu.program.bounded.text import Line, integers


class MixingRules:
    """Rules for reductions, products, sorting, gather and scatter."""

    def _reduce(self, lines: Sequence[Line], operands: Sequence[Padded]) -> list[Padded]:
        self._same_attributes(lines)
        line = lines[0]
        half = len(operands) // 2
        over = integers(line.attributes, "dimensions")
        values, dims = self.aligned(operands[:half])
        masked = [
            self.sizes.masked(Padded(x.value, dims), over, init.value)
            for x, init in zip(values, operands[half:], strict=True)
        ]
        rest = [replace(d, uniform=d.uniform) for k, d in enumerate(dims) if k not in over]
        feed = [*masked, *(x.value for x in operands[half:])]
        return self._emit(line, operands, line.attributes, [rest] * half, values=feed)

    def _dot_general(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        self._same_attributes(lines)
        x, y = operands
        attributes = lines[0].attributes
        both = {}
        for name in ("batching_dims", "contracting_dims"):
            found = re.search(rf"{name} = \[([\d, ]*)\] x \[([\d, ]*)\]", attributes)
            both[name] = (
                [[int(n) for n in g.split(",") if n.strip()] for g in found.groups()]
                if found
                else [[], []]
            )
        batch, contract = both["batching_dims"], both["contracting_dims"]
        for mine, yours in ((batch[0], batch[1]), (contract[0], contract[1])):
            for d, e in zip(mine, yours, strict=True):
                one, two = x.dims[d], y.dims[e]
                if one.size != two.size:
                    raise Unbounded("a product over different sizes")
                if one.factors == two.factors:
                    continue
                if one.uniform or (not two.uniform and len(two.factors) > len(one.factors)):
                    x = self.sizes.arranged(x, d, replace(two, uniform=False))
                else:
                    y = self.sizes.arranged(y, e, replace(one, uniform=False))
        left = self.sizes.masked(x, contract[0], 0)
        right = self.sizes.masked(y, contract[1], 0)
        dims = [x.dims[d] for d in batch[0]]
        dims += [x.dims[d] for d in range(len(x.dims)) if d not in (*batch[0], *contract[0])]
        dims += [y.dims[d] for d in range(len(y.dims)) if d not in (*batch[1], *contract[1])]
        return self._emit(lines[0], operands, attributes, [dims], values=[left, right])[0]

    def _sort(self, lines: Sequence[Line], operands: Sequence[Padded]) -> list[Padded]:
        self._same_attributes(lines)
        line = lines[0]
        (d,) = integers(line.attributes, "dimension")
        values, dims = self.aligned(operands)
        if not dims[d].padded:
            return self._emit(line, values, line.attributes, [dims] * len(values))
        if not dims[d].is_prefix:
            values = [self.sizes.arranged(x, d, dims[d].as_prefix()) for x in values]
            dims = values[0].dims
        # Places that are not real come last: one more value to sort by, before all others.
        b = self.b
        shape = values[0].value.shape
        outside = b.broadcast_in_dim(b.not_(self.sizes.valid(dims[d])), shape, [d])
        block = re.match(
            r"\{\n\s*\^bb0\(([^)]*)\):\n(.*)\n\s*stablehlo\.return (%\w+) : ",
            self._regions(line),
            re.S,
        )
        if block is None:
            raise Unbounded("a comparison of another form")
        arguments, body, result = block.groups()
        a, c, worse, equal, both, total = (b.fresh() for _ in range(6))
        i1 = "tensor<i1>"
        region = (
            f"{{\n      ^bb0({arguments}, {a}: {i1}, {c}: {i1}):\n{body}\n"
            f"      {worse} = stablehlo.compare LT, {a}, {c}, UNSIGNED : ({i1}, {i1}) -> {i1}\n"
            f"      {equal} = stablehlo.compare EQ, {a}, {c}, UNSIGNED : ({i1}, {i1}) -> {i1}\n"
            f"      {both} = stablehlo.and {equal}, {result} : {i1}\n"
            f"      {total} = stablehlo.or {worse}, {both} : {i1}\n"
            f"      stablehlo.return {total} : {i1}\n    }}"
        )
        feed = [*(x.value for x in values), outside]
        names = ", ".join(v.name for v in feed)
        types = ", ".join(v.type for v in feed)
        text = f'"stablehlo.sort"({names}){line.attributes} ({region}) : ({types}) -> ({types})'
        results = b.emit_many(text, [(v.shape, v.dtype) for v in feed])
        dims = tuple(replace(dim, uniform=False) for dim in dims)
        return [Padded(v, dims) for v in results[:-1]]

    def _gather(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        x, indices = operands
        line = lines[0]
        slices = self.attribute(lines, "slice_sizes")
        fields = {
            name: integers(line.attributes, name)
            for name in (
                "offset_dims",
                "collapsed_slice_dims",
                "operand_batching_dims",
                "start_indices_batching_dims",
            )
        }
        vector = integers(line.attributes, "index_vector_dim")[0]
        one = Expression.constant(1)
        bounds = []
        for d, size in enumerate(slices):
            if size == one:
                bounds.append(1)
            elif size == x.dims[d].size:
                bounds.append(x.dims[d].bound)
            else:
                raise Unbounded("a gather of windows")
            if x.dims[d].padded and not x.dims[d].is_prefix and size == one:
                x = self.sizes.arranged(x, d, x.dims[d].as_prefix())
        if vector < len(indices.dims) and indices.dims[vector].padded:
            raise Unbounded("a gather whose index grows")
        for mine, yours in zip(
            fields["operand_batching_dims"], fields["start_indices_batching_dims"], strict=True
        ):
            if x.dims[mine].padded:
                indices = self.sizes.arranged(indices, yours, x.dims[mine])
        batch = [dim for d, dim in enumerate(indices.dims) if d != vector]
        gone = (*fields["collapsed_slice_dims"], *fields["operand_batching_dims"])
        window = [
            fixed(1) if size == one else x.dims[d] for d, size in enumerate(slices) if d not in gone
        ]
        dims: list[Dim] = []
        rest, inner = iter(batch), iter(window)
        for d in range(len(batch) + len(window)):
            dims.append(next(inner) if d in fields["offset_dims"] else next(rest))
        dims = [replace(dim, uniform=False) for dim in dims]
        attributes = re.sub(
            r"slice_sizes = array<i64[^>]*>", f"slice_sizes = {int_array(bounds)}", line.attributes
        )
        return self._emit(line, [x, indices], attributes, [dims])[0]

    def _scatter(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        self._same_attributes(lines)
        line = lines[0]
        x, indices, updates = operands
        vector = integers(line.attributes, "index_vector_dim")[0]
        window = integers(line.attributes, "update_window_dims")
        inserted = integers(line.attributes, "inserted_window_dims")
        batching = integers(line.attributes, "input_batching_dims")
        of_indices = integers(line.attributes, "scatter_indices_batching_dims")
        spread = integers(line.attributes, "scatter_dims_to_operand_dims")
        b = self.b
        # Window dims of the updates lie on whole dims of the operand, padding on padding.
        targets = [d for d in range(len(x.dims)) if d not in (*inserted, *batching)]
        for u, d in zip(window, targets, strict=True):
            if updates.dims[u].size == x.dims[d].size:
                updates = self.sizes.arranged(updates, u, x.dims[d])
            elif updates.dims[u].padded or x.dims[d].padded:
                raise Unbounded("a scatter of windows")
        for d in inserted:
            if x.dims[d].padded and not x.dims[d].is_prefix:
                x = self.sizes.arranged(x, d, x.dims[d].as_prefix())
        for d, row in zip(batching, of_indices, strict=True):
            if indices.dims[row].uniform:
                indices = self.sizes.arranged(indices, row, replace(x.dims[d], uniform=False))
            else:
                x = self.sizes.arranged(x, d, indices.dims[row])
        if vector < len(indices.dims) and indices.dims[vector].padded:
            raise Unbounded("a scatter whose index grows")
        # Rows of updates that are not real go out of bounds, where they are dropped.
        rows = [u for u in range(len(updates.dims)) if u not in window]
        at = [d for d in range(len(indices.dims)) if d != vector]
        place = indices.value
        for u, d in zip(rows, at, strict=True):
            if updates.dims[u].factors != indices.dims[d].factors:
                updates = self.sizes.arranged(updates, u, indices.dims[d])
            if d in of_indices:
                continue
            if indices.dims[d].padded:
                if indices.dims[d].uniform:
                    raise Unbounded("a scatter to one place")
                inside = b.broadcast_in_dim(self.sizes.valid(indices.dims[d]), place.shape, [d])
                place = b.select(inside, place, b.constant(-1, place.dtype))
                if place.is_unsigned or not spread:
                    raise Unbounded("a scatter with unsigned indices")
        feed = [x.value, place, updates.value]
        dims = tuple(replace(dim, uniform=False) for dim in x.dims)
        return self._emit(line, operands, line.attributes, [dims], values=feed)[0]

    def _chlo_top_k(self, lines: Sequence[Line], operands: Sequence[Padded]) -> list[Padded]:
        self._same_attributes(lines)
        (x,) = operands
        (k,) = integers(lines[0].attributes, "k")
        last = len(x.dims) - 1
        if x.dims[last].padded and not x.dims[last].is_prefix:
            x = self.sizes.arranged(x, last, x.dims[last].as_prefix())
        value = x.value
        if x.dims[last].padded:
            # Below everything in its total order; what is real comes first among equals.
            lowest = self.b.emit(
                "stablehlo.constant dense<0xFFFFFFFF> : tensor<f32>", (), value.dtype
            )
            value = self.sizes.masked(x, [last], lowest)
        dims = (*x.dims[:last], fixed(k))
        specs = [(tuple(d.bound for d in dims), dtype) for _, dtype in lines[0].types]
        out = ", ".join(tensor_type(*spec) for spec in specs)
        text = f"chlo.top_k({value.name}, k = {k}) : {value.type} -> ({out})"
        return [Padded(v, dims) for v in self.b.emit_many(text, specs)]
