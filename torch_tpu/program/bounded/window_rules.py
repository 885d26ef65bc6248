"""Operations with windows, which must not see places that are not real."""

# Mixins of lift.Lift, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torch_tpu.lowering.types import int_array
from torch_tpu.program.bounded.expressions import Expression
from torch_tpu.program.bounded.layout import Dim, Padded, Unbounded
from torch_tpu.program.bounded.text import Line, integers, pairs


class WindowRules:
    """Rules for windowed reductions and convolution."""

    def _reduce_window(self, lines: Sequence[Line], operands: Sequence[Padded]) -> list[Padded]:
        line = lines[0]
        if any(o.regions != line.regions for o in lines[1:]):
            raise Unbounded("a window whose body changes")
        half = len(operands) // 2
        values, dims = self.aligned(operands[:half])
        window, strides, base, dilation = (
            self.attribute(lines, n)
            for n in ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
        )
        rows = [pairs(o.attributes, "padding") for o in lines]
        padding = [
            tuple(self.fitted([r[d][k] for r in rows]) for k in (0, 1)) for d in range(len(dims))
        ]
        sizes = self.shape(lines)
        wide, pads, outs = [], [], []
        one, zero = Expression.constant(1), Expression.constant(0)
        for d, dim in enumerate(dims):
            plain = window[d] == one and strides[d] == one and base[d] == one
            if plain and padding[d] == (zero, zero):
                wide.append(1)
                pads.append((0, 0))
                outs.append(dim)
                continue
            if not (strides[d].is_constant and base[d].is_constant and dilation[d].is_constant):
                raise Unbounded("a window whose step changes")
            if not dim.is_prefix:
                values = [self.sizes.arranged(x, d, dim.as_prefix()) for x in values]
                dims = values[0].dims
                dim = dims[d]
            if not dim.padded and window[d].is_constant and sizes[d].is_constant:
                wide.append(window[d].at(()))
                pads.append((padding[d][0].at(()), padding[d][1].at(())))
                outs.append(self.sizes.dim(sizes[d]))
                continue
            if base[d] != one:
                raise Unbounded("a dilated window over padding")
            # A window that grows with the size (a running sum) is as long as the bound.
            length = self.sizes.bound(window[d])
            outs.append(self.sizes.dim(sizes[d]))
            low = padding[d][0]
            if window[d].is_constant and low.is_constant:
                lo = low.at(())
            elif low == window[d] - one and padding[d][1] == zero:
                lo = length - 1
            elif low == zero and padding[d][1] == window[d] - one:
                lo = 0
            else:
                raise Unbounded("a window whose start changes")
            span = (length - 1) * dilation[d].at(()) + 1
            reach = (outs[-1].bound - 1) * strides[d].at(()) + span
            wide.append(length)
            pads.append((lo, reach - lo - dim.bound))
        masked = [
            self.sizes.masked(Padded(x.value, dims), range(len(dims)), init.value)
            for x, init in zip(values, operands[half:], strict=True)
        ]
        text = ", ".join(f"[{lo}, {hi}]" for lo, hi in pads)
        attributes = re.sub(
            r"window_dimensions = array<i64[^>]*>",
            f"window_dimensions = {int_array(wide)}",
            line.attributes,
        )
        attributes = re.sub(r"padding = dense<.*?> :", f"padding = dense<[{text}]> :", attributes)
        feed = [*masked, *(x.value for x in operands[half:])]
        outs = [replace(d, uniform=False) for d in outs]
        return self._emit(line, operands, attributes, [outs] * half, values=feed)

    def _convolution(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        line = lines[0]
        x, w = operands
        text = line.attributes
        found = re.search(r"dim_numbers = \[(.*?)\]x\[(.*?)\]->\[(.*?)\]", text)
        lhs, rhs, out = ([c.strip() for c in g.split(",")] for g in found.groups())  # type: ignore[union-attr]
        n = len(lhs) - 2

        def listed(name: str) -> list[Expression]:
            return self.attribute(lines, name)

        stride, left, right = listed("stride"), listed("lhs_dilate"), listed("rhs_dilate")
        rows = []
        for other in lines:
            inner = re.search(r"pad = \[(.*?)\], lhs_dilate", other.attributes).group(1)  # type: ignore[union-attr]
            flat = [int(v) for v in re.findall(r"-?\d+", inner)]
            rows.append(list(zip(flat[::2], flat[1::2], strict=True)))
        pads = [tuple(self.fitted([r[i][k] for r in rows]) for k in (0, 1)) for i in range(n)]
        groups = integers(text, "batch_group_count")[0] * integers(text, "feature_group_count")[0]
        for dim in (x.dims[lhs.index("f")], w.dims[rhs.index("o")], w.dims[rhs.index("i")]):
            if dim.padded and groups != 1:
                raise Unbounded("a grouped convolution whose channels change")
        sizes = self.shape(lines)
        dims: list[Dim] = [x.dims[lhs.index("b")]] * len(out)
        dims[out.index("b")] = x.dims[lhs.index("b")]
        dims[out.index("f")] = w.dims[rhs.index("o")]
        if integers(text, "batch_group_count")[0] != 1:
            if dims[out.index("b")].padded:
                raise Unbounded("a grouped convolution whose batch changes")
            dims[out.index("b")] = self.sizes.dim(sizes[out.index("b")])
        newpads = []
        for i in range(n):
            a, c = lhs.index(str(i)), rhs.index(str(i))
            for y, d in ((x, a), (w, c)):
                if y.dims[d].padded and not y.dims[d].is_prefix:
                    raise Unbounded("a convolution over padding")
            if not (stride[i].is_constant and left[i].is_constant and right[i].is_constant):
                raise Unbounded("a convolution whose step changes")
            size = sizes[out.index(str(i))]
            wanted = self.sizes.dim(size)
            dims[out.index(str(i))] = wanted
            if not pads[i][0].is_constant:
                raise Unbounded("a convolution whose padding changes")
            lo = pads[i][0].at(())
            window = (w.dims[c].bound - 1) * right[i].at(()) + 1
            length = (x.dims[a].bound - 1) * left[i].at(()) + 1
            reach = (wanted.bound - 1) * stride[i].at(()) + window
            newpads.append((lo, reach - lo - length))
        over = [lhs.index(str(i)) for i in range(n)] + [lhs.index("f")]
        kernel = [rhs.index(str(i)) for i in range(n)] + [rhs.index("i")]
        fi, fo = x.dims[lhs.index("f")], w.dims[rhs.index("i")]
        if fi.padded and fi.factors != fo.factors:
            w = self.sizes.arranged(w, rhs.index("i"), fi)
        values = [self.sizes.masked(x, over, 0), self.sizes.masked(w, kernel, 0)]
        if "reverse" in text and any(w.dims[d].padded for d in kernel[:-1]):
            raise Unbounded("a reversed kernel whose size changes")
        pad = ", ".join(f"[{lo}, {hi}]" for lo, hi in newpads)
        text = re.sub(r"pad = \[.*?\], lhs_dilate", f"pad = [{pad}], lhs_dilate", text)
        dims = [replace(d, uniform=False) for d in dims]
        return self._emit(line, [x, w], text, [dims], values=values)[0]
