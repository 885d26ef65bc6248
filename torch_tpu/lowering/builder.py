"""A builder of StableHLO text: one method per operation, shapes and dtypes inferred and checked.

Operands are :class:`Value` or Python numbers. Binary operations broadcast as NumPy does; a number
or a weak value takes the dtype of the tensor it meets. StableHLO's specification is the contract.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_tpu.lowering.checks import CheckMixin, Label
from torch_tpu.lowering.elementwise import ElementwiseMixin
from torch_tpu.lowering.linear_algebra import LinearAlgebraMixin
from torch_tpu.lowering.randomness import RandomMixin
from torch_tpu.lowering.regions import RegionMixin
from torch_tpu.lowering.types import (
    REAL_OF_COMPLEX,
    LoweringError,
    Operand,
    Value,
    broadcast_shapes,
    int_list,
    tensor_type,
)

_PACK = {
    torch.float64: ("<d", "<Q"),
    torch.float32: ("<f", "<I"),
    torch.float16: ("<e", "<H"),
}


# Constants of more elements are written as bytes.
_MAX_SPELT = 256


def _float_literal(value: float, dtype: torch.dtype) -> str:
    if math.isfinite(value):
        return repr(float(value)) if "e" not in repr(float(value)) else f"{float(value):.17e}"
    if dtype in _PACK:
        fmt, bits = _PACK[dtype]
        word = struct.unpack(bits, struct.pack(fmt, value))[0]
        return f"0x{word:0{dtype.itemsize * 2}X}"
    word = torch.tensor(value, dtype=dtype).view({1: torch.uint8, 2: torch.uint16}[dtype.itemsize])
    return f"0x{int(word.item()):0{dtype.itemsize * 2}X}"


def scalar_literal(value: Any, dtype: torch.dtype) -> str:
    """The MLIR literal of a Python number in ``dtype`` (wrapping and rounding as a C cast does)."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if dtype.is_complex:
        real = REAL_OF_COMPLEX[dtype]
        value = complex(value)
        return f"({_float_literal(value.real, real)}, {_float_literal(value.imag, real)})"
    if dtype.is_floating_point:
        value = float(value)
        limit = torch.finfo(dtype).max
        if math.isfinite(value) and abs(value) > limit:
            value = float(torch.tensor(value, dtype=torch.float64).to(dtype).double().item())
        return _float_literal(value, dtype)
    bits = dtype.itemsize * 8
    value = int(value) & ((1 << bits) - 1)
    if dtype.is_signed and value >= 1 << (bits - 1):
        value -= 1 << bits
    return str(value)


class Builder(ElementwiseMixin, LinearAlgebraMixin, RegionMixin, RandomMixin, CheckMixin):
    """Collects the body of one function. Nested regions are written through :meth:`region`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._next = 0
        self._indent = 2
        self._constants: list[dict[Any, Value]] = [{}]
        self._rng_draws = 0
        self.rng_state: tuple[Value, Value] | None = None  # (seed, offset), both i64 scalars
        self.rng_used = False
        self.checks: list[Value] = []
        self.check_labels: list[Label] = []
        self.describe_op: Callable[[], str] = lambda: ""
        self.matmul_precision = "DEFAULT"
        # Whether float32 products are written as the passes that a TPU's matrix unit makes.
        self.emulate_precision = False
        # "cpu" or "tpu": what the program is compiled for. Lowerings may choose a form that is
        # fast there; the values are the same.
        self.target = "cpu"
        # Names of argument values that PyTorch sees with strides that are not contiguous: a few ops
        # (LU-based ones) return something else for them.
        self._transposed: dict[str, tuple[Value, tuple[int, ...]]] = {}
        self.strided: set[str] = set()

    # -- text ------------------------------------------------------------------------------

    def fresh(self) -> str:
        self._next += 1
        return f"%{self._next}"

    def line(self, text: str) -> None:
        self._lines.append(" " * self._indent * 2 + text)

    def emit(self, text: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Append ``%n = text`` and return the value with this shape and dtype."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        return Value(name, tuple(shape), dtype)

    def emit_many(
        self, text: str, specs: Sequence[tuple[Sequence[int], torch.dtype]]
    ) -> tuple[Value, ...]:
        """Append an operation with several results."""
        if len(specs) == 1:
            return (self.emit(text, *specs[0]),)
        name = self.fresh()
        self.line(f"{name}:{len(specs)} = {text}")
        return tuple(Value(f"{name}#{i}", tuple(s), d) for i, (s, d) in enumerate(specs))

    def body(self) -> str:
        return "\n".join(self._lines)

    @contextmanager
    def region(self, args: Sequence[tuple[Sequence[int], torch.dtype]]) -> Iterator[list[Value]]:
        """Write one region: yields its block arguments; constants inside stay inside."""
        values = [Value(self.fresh(), tuple(s), d) for s, d in args]
        if values:
            self.line("^bb0(" + ", ".join(f"{v.name}: {v.type}" for v in values) + "):")
        self._constants.append({})
        self._indent += 1
        yield values
        self._indent -= 1
        self._constants.pop()

    def region_return(self, values: Sequence[Value]) -> None:
        names = ", ".join(v.name for v in values)
        types = ", ".join(v.type for v in values)
        self.line(f"stablehlo.return {names} : {types}")

    def nested(
        self,
        args: Sequence[tuple[Sequence[int], torch.dtype]],
        body: Callable[..., Value | Sequence[Value]],
    ) -> str:
        """The text of a region whose block arguments go to ``body(*values)``."""
        outer, self._lines = self._lines, []
        with self.region(args) as values:
            result = body(*values)
            self.region_return([result] if isinstance(result, Value) else list(result))
        text, self._lines = self._lines, outer
        return "{\n" + "\n".join(text) + "\n" + " " * self._indent * 2 + "}"

    def custom_call(
        self,
        target: str,
        operands: Sequence[Value],
        results: Sequence[tuple[Sequence[int], torch.dtype]],
        attributes: str = "",
    ) -> tuple[Value, ...]:
        """A custom call by name; ``attributes`` is extra MLIR attribute text."""
        names = ", ".join(v.name for v in operands)
        types = ", ".join(v.type for v in operands)
        outs = ", ".join(tensor_type(s, d) for s, d in results)
        outs = outs if len(results) == 1 else f"({outs})"
        extra = f", {attributes}" if attributes else ""
        text = (
            f'"stablehlo.custom_call"({names}) <{{call_target_name = "{target}"{extra}}}> '
            f": ({types}) -> {outs}"
        )
        return self.emit_many(text, results)

    # -- constants and conversions ---------------------------------------------------------

    def constant(self, value: Any, dtype: torch.dtype, shape: Sequence[int] = ()) -> Value:
        """A splat constant of ``shape``."""
        shape = tuple(shape)
        literal = scalar_literal(value, dtype)
        key = (literal, dtype, shape)
        for scope in reversed(self._constants[-1:]):
            if key in scope:
                return scope[key]
        text = f"stablehlo.constant dense<{literal if math.prod(shape) else ''}>"
        result = self.emit(f"{text} : {tensor_type(shape, dtype)}", shape, dtype)
        self._constants[-1][key] = result
        return result

    def constant_array(self, values: Any, dtype: torch.dtype) -> Value:
        """A constant from a (nested) list or a CPU tensor; large ones are written as bytes."""
        tensor = torch.as_tensor(values).to(dtype)
        if tensor.numel() > _MAX_SPELT:
            return self._constant_bytes(tensor)

        def nest(t: torch.Tensor) -> str:
            if t.dim() == 0:
                return scalar_literal(t.item(), dtype)
            return "[" + ", ".join(nest(s) for s in t) + "]"

        body = nest(tensor) if tensor.numel() else ""
        shape = tuple(tensor.shape)
        return self.emit(
            f"stablehlo.constant dense<{body}> : {tensor_type(shape, dtype)}", shape, dtype
        )

    def _constant_bytes(self, tensor: torch.Tensor) -> Value:
        if tensor.dtype is torch.bool:
            return self.ne(self._constant_bytes(tensor.to(torch.uint8)), 0)
        if tensor.dtype.is_complex:
            parts = self._constant_bytes(torch.view_as_real(tensor.resolve_conj()))
            return self.complex(self.index_dim(parts, -1, 0), self.index_dim(parts, -1, 1))
        flat = tensor.resolve_neg().contiguous().reshape(-1)
        body = flat.view(torch.uint8).numpy().tobytes().hex().upper()
        shape = tuple(tensor.shape)
        out = tensor_type(shape, tensor.dtype)
        return self.emit(f'stablehlo.constant dense<"0x{body}"> : {out}', shape, tensor.dtype)

    def full(self, shape: Sequence[int], value: Operand, dtype: torch.dtype) -> Value:
        """A tensor of ``shape`` filled with a number or with a 0-d value."""
        if isinstance(value, Value):
            return self.broadcast_to(self.convert(value, dtype), shape)
        return self.constant(value, dtype, shape)

    def as_value(self, x: Operand, dtype: torch.dtype) -> Value:
        """``x`` as a value of ``dtype``: numbers become 0-d constants, values are converted."""
        if isinstance(x, Value):
            return self.convert(x, dtype)
        return self.constant(x, dtype)

    def convert(self, x: Value, dtype: torch.dtype) -> Value:
        """Value conversion with PyTorch's rules (to bool: x != 0; complex to real: real part;
        float8_e4m3fn, which has no infinity, saturates)."""
        if x.dtype is dtype:
            return x if not x.weak else Value(x.name, x.shape, x.dtype)
        if dtype is torch.bool:
            return self.ne(x, 0)
        if x.dtype.is_complex and not dtype.is_complex:
            return self.convert(self.real(x), dtype)
        if dtype.is_complex and not x.dtype.is_complex:
            part = self.convert(x, REAL_OF_COMPLEX[dtype])
            return self.complex(part, self.constant(0, part.dtype, part.shape))
        if x.dtype.is_floating_point and dtype in (
            torch.uint8,
            torch.uint16,
            torch.int8,
            torch.int16,
        ):
            # A C cast goes through a wide integer and wraps; stablehlo.convert saturates.
            x = self._raw_convert(x, torch.int64 if x.dtype.itemsize > 4 else torch.int32)
        if dtype is torch.float8_e4m3fn:
            # stablehlo.convert makes NaN of what is too large.
            wide = x if x.is_float and x.dtype.itemsize > 1 else self._raw_convert(x, torch.float32)
            x = self.clamp(wide, -448.0, 448.0)
        return self._raw_convert(x, dtype)

    def _raw_convert(self, x: Value, dtype: torch.dtype) -> Value:
        out = tensor_type(x.shape, dtype)
        return self.emit(f"stablehlo.convert {x.name} : ({x.type}) -> {out}", x.shape, dtype)

    def bitcast(self, x: Value, dtype: torch.dtype) -> Value:
        """Reinterpret bits. A narrower dtype adds a trailing dim, a wider one removes it."""
        old, new = x.dtype.itemsize, dtype.itemsize
        if old == new:
            shape = x.shape
        elif old > new:
            shape = (*x.shape, old // new)
        else:
            if not x.shape or x.shape[-1] != new // old:
                raise LoweringError(f"bitcast {x.type} to {dtype}: last dim must be {new // old}")
            shape = x.shape[:-1]
        out = tensor_type(shape, dtype)
        return self.emit(f"stablehlo.bitcast_convert {x.name} : ({x.type}) -> {out}", shape, dtype)

    # -- shape -----------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Row-major reshape; one entry may be -1."""
        shape = tuple(shape)
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(x.numel // known if d == -1 else d for d in shape)
        if shape == x.shape:
            return x
        if math.prod(shape) != x.numel:
            raise LoweringError(f"reshape {x.shape} to {shape}: sizes differ")
        out = tensor_type(shape, x.dtype)
        return self.emit(f"stablehlo.reshape {x.name} : ({x.type}) -> {out}", shape, x.dtype)

    def transpose(self, x: Value, dims: Sequence[int]) -> Value:
        """Permute: result dim i is operand dim ``dims[i]``."""
        dims = [d % max(x.rank, 1) for d in dims]
        if dims == list(range(x.rank)):
            return x
        shape = tuple(x.shape[d] for d in dims)
        out = tensor_type(shape, x.dtype)
        text = f"stablehlo.transpose {x.name}, dims = {int_list(dims)} : ({x.type}) -> {out}"
        result = self.emit(text, shape, x.dtype)
        self._transposed[result.name] = (x, tuple(dims))
        return result

    def swap(self, x: Value, a: int, c: int) -> Value:
        """Exchange two dims."""
        dims = list(range(x.rank))
        dims[a], dims[c] = dims[c], dims[a]
        return self.transpose(x, dims)

    def move_dim(self, x: Value, source: int, target: int) -> Value:
        dims = list(range(x.rank))
        d = dims.pop(source)
        dims.insert(target % x.rank, d)
        return self.transpose(x, dims)

    def broadcast_in_dim(self, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Operand dim i becomes result dim ``dims[i]``; size 1 may grow."""
        shape = tuple(shape)
        if shape == x.shape and list(dims) == list(range(x.rank)):
            return x
        out = tensor_type(shape, x.dtype)
        text = f"stablehlo.broadcast_in_dim {x.name}, dims = {int_list(dims)} : ({x.type}) -> {out}"
        return self.emit(text, shape, x.dtype)

    def broadcast_to(self, x: Value, shape: Sequence[int]) -> Value:
        """Expand to ``shape`` by NumPy's rule (align at the right)."""
        shape = tuple(shape)
        if shape == x.shape:
            return x
        lead = len(shape) - x.rank
        if lead < 0 or any(a not in (1, c) for a, c in zip(x.shape, shape[lead:], strict=True)):
            raise LoweringError(f"cannot broadcast {x.shape} to {shape}")
        return self.broadcast_in_dim(x, shape, range(lead, len(shape)))

    def broadcast(self, *values: Value) -> list[Value]:
        """Broadcast all values to their common shape."""
        shape = broadcast_shapes(*(v.shape for v in values))
        return [self.broadcast_to(v, shape) for v in values]

    def unsqueeze(self, x: Value, dim: int) -> Value:
        dim = dim % (x.rank + 1)
        return self.reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))

    def squeeze(self, x: Value, dim: int) -> Value:
        dim = dim % max(x.rank, 1)
        return self.reshape(x, x.shape[:dim] + x.shape[dim + 1 :])

    def slice(
        self,
        x: Value,
        starts: Sequence[int],
        limits: Sequence[int],
        steps: Sequence[int] | None = None,
    ) -> Value:
        """Static slice over every dim."""
        steps = [1] * x.rank if steps is None else list(steps)
        triples = list(zip(starts, limits, steps, strict=True))
        if all(s == 0 and e == n and t == 1 for (s, e, t), n in zip(triples, x.shape, strict=True)):
            return x
        shape = tuple(max(0, -(-(e - s) // t)) for s, e, t in triples)
        ranges = ", ".join(f"{s}:{e}" + (f":{t}" if t != 1 else "") for s, e, t in triples)
        out = tensor_type(shape, x.dtype)
        return self.emit(
            f"stablehlo.slice {x.name} [{ranges}] : ({x.type}) -> {out}", shape, x.dtype
        )

    def slice_dim(self, x: Value, dim: int, start: int, limit: int, step: int = 1) -> Value:
        """Static slice of one dim."""
        dim %= x.rank
        starts = [0] * x.rank
        limits = list(x.shape)
        steps = [1] * x.rank
        starts[dim], limits[dim], steps[dim] = start, limit, step
        return self.slice(x, starts, limits, steps)

    def index_dim(self, x: Value, dim: int, index: int) -> Value:
        """``x.select(dim, index)`` with a static index."""
        dim %= x.rank
        index %= x.shape[dim]
        return self.squeeze(self.slice_dim(x, dim, index, index + 1), dim)

    def dynamic_slice(self, x: Value, starts: Sequence[Operand], sizes: Sequence[int]) -> Value:
        """Slice at run-time starts (i64 scalars or ints); starts are clamped by XLA."""
        if tuple(sizes) == x.shape:
            return x
        if all(isinstance(s, int) for s in starts):
            limits = [int(s) + n for s, n in zip(starts, sizes, strict=True)]  # type: ignore[arg-type]
            return self.slice(x, starts, limits)  # type: ignore[arg-type]
        at = [self.as_value(s, torch.int64) for s in starts]
        names = "".join(f", {v.name}" for v in at)
        types = ", ".join([x.type] + [v.type for v in at])
        out = tensor_type(sizes, x.dtype)
        text = (
            f"stablehlo.dynamic_slice {x.name}{names}, sizes = {int_list(sizes)} "
            f": ({types}) -> {out}"
        )
        return self.emit(text, sizes, x.dtype)

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Operand]) -> Value:
        """``x`` with the block at ``starts`` replaced by ``update`` (same rank)."""
        if update.shape == x.shape:
            return update
        at = [self.as_value(s, torch.int64) for s in starts]
        names = "".join(f", {v.name}" for v in at)
        types = ", ".join([x.type, update.type] + [v.type for v in at])
        text = (
            f"stablehlo.dynamic_update_slice {x.name}, {update.name}{names} : ({types}) -> {x.type}"
        )
        return self.emit(text, x.shape, x.dtype)

    def pad(
        self,
        x: Value,
        value: Operand,
        low: Sequence[int],
        high: Sequence[int],
        interior: Sequence[int] | None = None,
    ) -> Value:
        """Pad with ``value``; negative amounts crop; ``interior`` goes between elements."""
        interior = [0] * x.rank if interior is None else list(interior)
        if not any(low) and not any(high) and not any(interior):
            return x
        fill = self.as_value(value, x.dtype)
        shape = tuple(
            lo + hi + n + max(n - 1, 0) * i
            for lo, hi, n, i in zip(low, high, x.shape, interior, strict=True)
        )
        out = tensor_type(shape, x.dtype)
        text = (
            f"stablehlo.pad {x.name}, {fill.name}, low = {int_list(low)}, high = {int_list(high)}, "
            f"interior = {int_list(interior)} : ({x.type}, {fill.type}) -> {out}"
        )
        return self.emit(text, shape, x.dtype)

    def pad_dim(self, x: Value, dim: int, value: Operand, low: int, high: int) -> Value:
        dim %= x.rank
        lows, highs = [0] * x.rank, [0] * x.rank
        lows[dim], highs[dim] = low, high
        return self.pad(x, value, lows, highs)

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """Join along ``dim``; all of one dtype."""
        if len(values) == 1:
            return values[0]
        dim %= values[0].rank
        size = sum(v.shape[dim] for v in values)
        shape = (*values[0].shape[:dim], size, *values[0].shape[dim + 1 :])
        names = ", ".join(v.name for v in values)
        types = ", ".join(v.type for v in values)
        out = tensor_type(shape, values[0].dtype)
        text = f"stablehlo.concatenate {names}, dim = {dim} : ({types}) -> {out}"
        return self.emit(text, shape, values[0].dtype)

    def stack(self, values: Sequence[Value], dim: int) -> Value:
        """Join along a new dim."""
        return self.concatenate(
            [self.unsqueeze(v, dim) for v in values], dim % (values[0].rank + 1)
        )

    def reverse(self, x: Value, dims: Sequence[int]) -> Value:
        if not dims or x.numel == 0:
            return x
        text = f"stablehlo.reverse {x.name}, dims = {int_list(sorted(dims))} : {x.type}"
        return self.emit(text, x.shape, x.dtype)

    def iota(self, shape: Sequence[int], dim: int, dtype: torch.dtype = torch.int64) -> Value:
        """Counts 0, 1, 2 … along ``dim``."""
        if dtype is torch.bool:
            return self.ne(self.iota(shape, dim, torch.int32), 0)
        if dtype.is_floating_point and dtype.itemsize < 4:
            return self.convert(self.iota(shape, dim, torch.int64), dtype)
        out = tensor_type(shape, dtype)
        return self.emit(f"stablehlo.iota dim = {dim} : {out}", shape, dtype)

    # -- checks ----------------------------------------------------------------------------

    def check_index(self, index: Value, size: int, wrap: bool = True) -> Value:
        """Wrap negative indices and note those outside [-size, size) for the device flag.

        ``wrap=False`` is for ops that refuse negative indices: the range is [0, size).
        Returns the wrapped index; the flag raises IndexError at the next synchronisation.
        """
        if index.is_unsigned:
            # A narrow type may not hold the size, and then no value is out of range.
            if size <= torch.iinfo(index.dtype).max:
                self.note_bad_index(self.ge(index, size))
            return index
        if size > torch.iinfo(index.dtype).max:
            index = self.convert(index, torch.int64)
        if wrap:
            index = self.select(self.lt(index, 0), self.add(index, size), index)
        self.note_bad_index(self.or_(self.lt(index, 0), self.ge(index, size)))
        return index

    def optimization_barrier(self, *values: Value) -> tuple[Value, ...]:
        names = ", ".join(v.name for v in values)
        types = ", ".join(v.type for v in values)
        return self.emit_many(
            f"stablehlo.optimization_barrier {names} : {types}",
            [(v.shape, v.dtype) for v in values],
        )
