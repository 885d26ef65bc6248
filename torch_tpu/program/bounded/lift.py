"""From programs for a few sizes to one program for all sizes up to a bound.

The same call is lowered for several values of the sizes that change (the *symbols*). Where the
programs differ in numbers only, each number is an expression of the symbols (``expressions.py``).
The bounded program does the same operations on values as long as the bounds ask for, with the sizes
as operands: operations that mix places (reductions, products, sorting, writes) see a neutral value
at places that are not real, all others may leave anything there. What is not known to be safe is
refused, and the call gets a program for its own sizes as before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.types import Value, tensor_type
from torch_tpu.program.bounded.expressions import Expression, fit
from torch_tpu.program.bounded.layout import Dim, Padded, Sizes, Unbounded, fixed
from torch_tpu.program.bounded.mixing_rules import MixingRules
from torch_tpu.program.bounded.shape_rules import ShapeRules
from torch_tpu.program.bounded.text import (
    Function,
    Line,
    Unreadable,
    integers,
    read_function,
)
from torch_tpu.program.bounded.window_rules import WindowRules
from torch_tpu.program.emitter import eliminate_dead_lines

_ELEMENTWISE = frozenset(
    f"stablehlo.{kind}"
    for kind in (
        *("add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum"),
        *("atan2", "negate", "abs", "sign", "and", "or", "xor", "not", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "popcnt", "count_leading_zeros"),
        *("compare", "select", "is_finite", "real", "imag", "complex", "exponential"),
        *("exponential_minus_one", "log", "log_plus_one", "sqrt", "rsqrt", "cbrt", "sine"),
        *("cosine", "tan", "tanh", "logistic", "floor", "ceil", "round_nearest_even"),
        *("round_nearest_afz", "convert", "reduce_precision", "clamp"),
    )
)

# Always written with the types of operands and result.
_LONG_FORM = frozenset({"stablehlo.convert", "stablehlo.compare", "stablehlo.complex"})


def read(text: str) -> Function:
    try:
        return read_function(text)
    except Unreadable as error:
        raise Unbounded(f"cannot be read: {error}") from None


def structure(function: Function) -> object:
    """What programs for several sizes have in common."""
    return (
        tuple(
            (line.kind, *line.operands, line.count, len(line.regions)) for line in function.lines
        ),
        tuple(function.results),
        len(function.parameters),
    )


class Lift(ShapeRules, MixingRules, WindowRules):
    """The bounded program of ``samples``, of one structure, for the symbol values ``points``.

    ``first_size``: place of the first symbol in the pack of ints, which it makes longer.
    ``donations``: parameters that a result is written over, {parameter: result}.
    ``targets``: the shapes the results are to have; None leaves a result as the bounds make it.
    :meth:`text` raises Unbounded.
    """

    def __init__(
        self,
        samples: Sequence[Function],
        points: Sequence[Sequence[int]],
        bounds: Sequence[int],
        *,
        first_size: int,
        targets: Sequence[Sequence[int] | None],
        donations: Mapping[int, int],
    ) -> None:
        self.samples = samples
        self.points = points
        self.targets = targets
        self.b = OpBuilder()
        self.env: dict[str, Padded] = {}
        self.parameters: list[tuple[Value, int]] = []
        self.donations = donations
        total = first_size + len(bounds)
        ints = Value("%ints", (total,), torch.int64)
        self.ints = ints
        operands = [
            self.b.reshape(self.b.slice_dim(ints, 0, first_size + k, first_size + k + 1), ())
            for k in range(len(bounds))
        ]
        self.sizes = Sizes(self.b, bounds, operands)
        self._read_parameters()

    def _read_parameters(self) -> None:
        for k, (name, (shape, dtype), _) in enumerate(self.samples[0].parameters):
            if name == "%ints":
                continue
            if any(other.parameters[k][1] != (shape, dtype) for other in self.samples):
                raise Unbounded("a parameter whose shape changes")
            value = Value(name, shape, dtype)
            self.env[name] = Padded(value, tuple(fixed(n) for n in shape))
            self.parameters.append((value, self.donations.get(k, -1)))
        self.env["%ints"] = Padded(self.ints, (fixed(self.ints.shape[0]),))

    def text(self) -> str:
        for k in range(len(self.samples[0].lines)):
            self._line([sample.lines[k] for sample in self.samples])
        b = self.b
        results: list[Value] = []
        for name, target in zip(self.samples[0].results, self.targets, strict=False):
            x = self.env[name]
            for d, n in enumerate(target if target is not None else ()):
                x = self.sizes.resized(x, d, n)
            results.append(x.value)
        for name in self.samples[0].results[len(results) :]:
            results.append(self.env[name].value)
        parameters = []
        at_ints = len([p for p, _ in self.parameters if p.name != "%floats"])
        for value, alias in self.parameters:
            keep = alias >= 0 and results[alias].type == value.type
            mark = f" {{tf.aliasing_output = {alias} : i32}}" if keep else ""
            parameters.append(f"{value.name}: {value.type}{mark}")
        parameters.insert(at_ints, f"%ints: {self.ints.type}")
        types = ", ".join(v.type for v in results)
        body = eliminate_dead_lines(b._lines, [v.name for v in results])
        return (
            f"module {{\n  func.func public @main({', '.join(parameters)}) -> ({types}) {{\n"
            + "\n".join(body)
            + f"\n    return {', '.join(v.name for v in results)} : {types}\n  }}\n}}\n"
        )

    # -- numbers ---------------------------------------------------------------------------

    def fitted(self, values: Sequence[int]) -> Expression:
        found = fit(values, self.points)
        if found is None:
            raise Unbounded(f"a number that follows no rule: {list(values)} for {self.points}")
        return found

    def shape(self, lines: Sequence[Line], result: int = 0) -> list[Expression]:
        shapes = [line.types[result][0] for line in lines]
        if len({len(s) for s in shapes}) > 1:
            raise Unbounded("another rank for other sizes")
        return [self.fitted([s[d] for s in shapes]) for d in range(len(shapes[0]))]

    def attribute(self, lines: Sequence[Line], name: str) -> list[Expression]:
        lists = [integers(line.attributes, name) for line in lines]
        return [self.fitted(values) for values in zip(*lists, strict=True)]

    # -- one operation ---------------------------------------------------------------------

    def _line(self, lines: Sequence[Line]) -> None:
        line = lines[0]
        for other in lines[1:]:
            if (other.kind, other.operands, other.count) != (line.kind, line.operands, line.count):
                raise Unbounded("other operations for other sizes")
        operands = [self.env[name] for name in line.operands]
        alike = all(
            other.attributes == line.attributes
            and other.regions == line.regions
            and other.types == line.types
            for other in lines[1:]
        )
        if alike and not any(x.padded for x in operands) and "%ints" not in line.operands:
            results = self._verbatim(line, operands)
        elif line.kind in _ELEMENTWISE or (
            line.kind.startswith("chlo.") and line.kind != "chlo.top_k"
        ):
            self._same_attributes(lines)
            results = [self._elementwise(lines, operands)]
        else:
            rule = getattr(self, "_" + line.kind.removeprefix("stablehlo.").replace(".", "_"), None)
            if rule is None:
                raise Unbounded(f"no rule for {line.kind}")
            results = rule(lines, operands)
            results = [results] if isinstance(results, Padded) else list(results)
        if line.count == 1:
            self.env["%" + line.name] = results[0]
        else:
            for k, result in enumerate(results):
                self.env[f"%{line.name}#{k}"] = result

    def _same_attributes(self, lines: Sequence[Line]) -> None:
        line = lines[0]
        if any(o.attributes != line.attributes or o.regions != line.regions for o in lines[1:]):
            raise Unbounded(f"{line.kind} with numbers that change")

    def _renamed(self, text: str, line: Line, operands: Sequence[Padded]) -> str:
        names = {old: x.value.name for old, x in zip(line.operands, operands, strict=True)}
        return re.sub(r"%[A-Za-z0-9_]+(?:#\d+)?", lambda m: names.get(m.group(), m.group()), text)

    def _regions(self, line: Line) -> str:
        """Regions with names of their own; they may read outer values that are not padded."""
        own: dict[str, str] = {}
        text = ", ".join(line.regions)
        defined = set(re.findall(r"(%\w+)(?=:? ?(?:\d+ )?= )", text))
        for group in re.findall(r"\^bb0\(([^)]*)\)", text):
            defined |= set(re.findall(r"(%\w+):", group))
        for several in re.findall(r"(%\w+):\d+ = ", text):
            defined.add(several)

        def rename(match: re.Match[str]) -> str:
            name = match.group()
            base, mark, rest = name.partition("#")
            if base in defined:
                if base not in own:
                    own[base] = self.b.fresh()
                return own[base] + mark + rest
            if name in self.env:
                if self.env[name].padded:
                    raise Unbounded("a region that reads a padded value")
                return self.env[name].value.name
            return name

        return re.sub(r"%[A-Za-z0-9_]+(?:#\d+)?", rename, text)

    def _emit(
        self,
        line: Line,
        operands: Sequence[Padded],
        attributes: str,
        dims: Sequence[Sequence[Dim]],
        *,
        values: Sequence[Value] | None = None,
    ) -> list[Padded]:
        """The operation with other operands and attributes; generic where it has regions."""
        values = [x.value for x in operands] if values is None else list(values)
        specs = [
            (tuple(d.bound for d in ds), dtype)
            for ds, (_, dtype) in zip(dims, line.types, strict=True)
        ]
        types = ", ".join(v.type for v in values)
        outs = ", ".join(tensor_type(s, t) for s, t in specs)
        outs = outs if len(specs) == 1 and not line.regions else f"({outs})"
        if line.regions or not attributes or "<{" in attributes or line.kind.startswith("chlo"):
            names = ", ".join(v.name for v in values)
            regions = f" ({self._regions(line)})" if line.regions else ""
            text = f'"{line.kind}"({names}){attributes}{regions} : ({types}) -> {outs}'
        else:
            feed = iter(values)  # one operand may stand here twice, with other masks
            attributes = re.sub(r"%[A-Za-z0-9_]+(?:#\d+)?", lambda _: next(feed).name, attributes)
            text = f"{line.kind}{attributes} : ({types}) -> {outs}"
        results = self.b.emit_many(text, specs)
        return [Padded(v, tuple(ds)) for v, ds in zip(results, dims, strict=True)]

    def _verbatim(self, line: Line, operands: Sequence[Padded]) -> list[Padded]:
        dims = [[fixed(n) for n in shape] for shape, _ in line.types]
        if line.kind in ("stablehlo.constant", "stablehlo.iota"):
            shape, dtype = line.types[0]
            text = f"{line.kind}{line.attributes} : {tensor_type(shape, dtype)}"
            uniform = line.kind == "stablehlo.constant" and "[" not in line.attributes
            value = self.b.emit(text, shape, dtype)
            return [Padded(value, tuple(replace(fixed(n), uniform=uniform) for n in shape))]
        if line.kind in _ELEMENTWISE:
            return [self._elementwise([line], operands)]
        if line.kind == "chlo.top_k":
            return self._chlo_top_k([line], operands)
        if line.kind == "stablehlo.reverse":
            wanted = integers(line.attributes, "dims")
            value = self.b.reverse(operands[0].value, wanted)
            return [Padded(value, operands[0].dims)]
        if line.kind == "stablehlo.optimization_barrier":
            return self._optimization_barrier([line], operands)
        return self._emit(line, operands, line.attributes, dims)

    # -- elementwise -----------------------------------------------------------------------

    def aligned(self, operands: Sequence[Padded]) -> tuple[list[Padded], tuple[Dim, ...]]:
        """Operands of one real shape, brought to one arrangement."""
        dims: list[Dim] = []
        out = list(operands)
        for d in range(len(operands[0].dims)):
            if any(x.dims[d].size != operands[0].dims[d].size for x in operands):
                raise Unbounded("operands of different sizes")
            shaped = [x.dims[d] for x in out if not x.dims[d].uniform]
            if not shaped:
                dims.append(out[0].dims[d])
                continue
            wanted = max(shaped, key=lambda dim: len(dim.factors))
            out = [self.sizes.arranged(x, d, replace(wanted, uniform=False)) for x in out]
            dims.append(wanted)
        return out, tuple(dims)

    def _elementwise(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        line = lines[0]
        wide = [x for x in operands if x.dims]
        if len(wide) == len(operands):
            operands, dims = self.aligned(operands)
        elif not wide:
            dims = ()
        else:  # a scalar predicate of select, or scalar bounds of clamp
            placed, dims = self.aligned(wide)
            rest = iter(placed)
            operands = [next(rest) if x.dims else x for x in operands]
        values = [x.value for x in operands]
        dtype = line.types[0][1]
        shape = tuple(d.bound for d in dims)
        out = tensor_type(shape, dtype)
        head = self._renamed(line.attributes, line, operands)
        if line.kind == "stablehlo.select":
            text = f"{line.kind}{head} : {values[0].type}, {values[1].type}"
        elif line.kind.startswith("chlo."):
            names = ", ".join(v.name for v in values)
            types = ", ".join(v.type for v in values)
            text = f'"{line.kind}"({names}) : ({types}) -> {out}'
        elif line.kind not in _LONG_FORM and all(v.type == out for v in values):
            text = f"{line.kind}{head} : {out}"
        else:
            types = ", ".join(v.type for v in values)
            text = f"{line.kind}{head} : ({types}) -> {out}"
        return Padded(self.b.emit(text, shape, dtype), dims)

    def _optimization_barrier(
        self, lines: Sequence[Line], operands: Sequence[Padded]
    ) -> list[Padded]:
        values = self.b.optimization_barrier(*[x.value for x in operands])
        return [Padded(v, x.dims) for v, x in zip(values, operands, strict=True)]

    def _bitcast_convert(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        (x,) = operands
        value = self.b.bitcast(x.value, lines[0].types[0][1])
        if value.rank == len(x.dims):
            return Padded(value, x.dims)
        if value.rank > len(x.dims):
            return Padded(value, (*x.dims, fixed(value.shape[-1])))
        if x.dims[-1].padded:
            raise Unbounded("a bitcast over padding")
        return Padded(value, x.dims[:-1])

    # -- made from nothing -----------------------------------------------------------------

    def _constant(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        line = lines[0]
        literals = [re.match(r" dense<(.*)>$", o.attributes) for o in lines]
        if any(m is None or "[" in m.group(1) or '"' in m.group(1) for m in literals):
            raise Unbounded("an array that changes")
        texts = [m.group(1) for m in literals]  # type: ignore[union-attr]
        dtype = line.types[0][1]
        sizes = self.shape(lines)
        dims = tuple(replace(self.sizes.dim(s), uniform=True) for s in sizes)
        shape = tuple(d.bound for d in dims)
        if all(t == texts[0] for t in texts):
            if texts[0] == "":
                raise Unbounded("an empty constant")
            text = f"stablehlo.constant dense<{texts[0]}> : {tensor_type(shape, dtype)}"
            return Padded(self.b.emit(text, shape, dtype), dims)
        number = self._number(texts, dtype)
        return Padded(self.b.broadcast_in_dim(number, shape, []), dims)

    def _number(self, texts: Sequence[str], dtype: torch.dtype) -> Value:
        """A number that changes with the sizes, as a scalar."""
        b = self.b
        if dtype.is_complex or dtype is torch.bool or any("0x" in t for t in texts):
            raise Unbounded("a constant that changes")
        values = [float(t) for t in texts]
        if all(v.is_integer() for v in values):
            found = fit([int(v) for v in values], self.points)
            if found is not None:
                return b.convert(self.sizes.as_value(self.sizes.real(found)), dtype)
        if not dtype.is_floating_point:
            raise Unbounded(f"a number that follows no rule: {list(texts)} for {self.points}")

        # A small number divided by an integer: 1 / n of a mean, 2 / (n - 1) of a variance.
        def rounded(value: float) -> float:
            return torch.tensor(value, dtype=dtype).item()

        for numerator in (1.0, 2.0, 0.5, 3.0, 4.0, 6.0) if all(values) else ():
            whole = [round(numerator / v) for v in values]
            found = fit(whole, self.points) if all(whole) else None
            if found is not None and all(
                rounded(numerator / w) == rounded(v) for w, v in zip(whole, values, strict=True)
            ):
                count = b.convert(self.sizes.as_value(self.sizes.real(found)), torch.float64)
                return b.convert(b.div(numerator, count), dtype)
        raise Unbounded(f"a number that follows no rule: {', '.join(texts)}")

    def _iota(self, lines: Sequence[Line], operands: Sequence[Padded]) -> Padded:
        (d,) = {integers(line.attributes, "dim")[0] for line in lines}
        sizes = self.shape(lines)
        dims = [replace(self.sizes.dim(s), uniform=k != d) for k, s in enumerate(sizes)]
        value = self.b.iota([x.bound for x in dims], d, lines[0].types[0][1])
        return Padded(value, tuple(dims))
