"""Builder operations on matrices: products, convolutions, transforms, factorisations."""

# A mixin of Builder, whose methods mypy cannot see from here, and which it passes on as itself.
# mypy: disable-error-code="attr-defined, arg-type"

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering import precision
from torch_tpu.lowering.types import (
    REAL_OF_COMPLEX,
    Value,
    int_list,
    tensor_type,
)


class LinearAlgebraMixin:
    """Float32 products follow the builder's precision (see :mod:`.precision`)."""

    def dot_general(
        self,
        x: Value,
        y: Value,
        contract: tuple[Sequence[int], Sequence[int]],
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
        dtype: torch.dtype | None = None,
    ) -> Value:
        """Batched contraction; result dims are batch, then x's free, then y's free dims.

        ``dtype`` is the accumulation and result dtype (default: x's).
        """
        dtype = dtype or x.dtype
        if precision.applies(self, x, y):
            return precision.emulated(
                self, x, y, lambda a, c: self._dot_general(a, c, contract, batch, dtype)
            )
        return self._dot_general(x, y, contract, batch, dtype)

    def _dot_general(
        self,
        x: Value,
        y: Value,
        contract: tuple[Sequence[int], Sequence[int]],
        batch: tuple[Sequence[int], Sequence[int]],
        dtype: torch.dtype,
    ) -> Value:
        # A matmul reads its operands in any order of dims, so a transpose before it is dropped.
        x, contract_x, batch_x = self._untransposed(x, contract[0], batch[0])
        y, contract_y, batch_y = self._untransposed(y, contract[1], batch[1])
        contract, batch = (contract_x, contract_y), (batch_x, batch_y)
        free_x = [d for d in range(x.rank) if d not in batch[0] and d not in contract[0]]
        free_y = [d for d in range(y.rank) if d not in batch[1] and d not in contract[1]]
        shape = tuple(
            [x.shape[d] for d in batch[0]]
            + [x.shape[d] for d in free_x]
            + [y.shape[d] for d in free_y]
        )
        if self.target == "tpu" and dtype in (torch.int64, torch.uint64):
            # The TPU compiler has no 64-bit integer matmul; this fuses into one loop.
            places = list(range(len(shape) + len(contract[0])))
            n, m = len(batch[0]), len(batch[0]) + len(free_x)
            place_x = dict(zip([*batch[0], *free_x], places[:m], strict=True))
            place_x |= dict(zip(contract[0], places[len(shape) :], strict=True))
            place_y = dict(zip([*batch[1], *free_y], [*places[:n], *places[m:]], strict=False))
            place_y |= dict(zip(contract[1], places[len(shape) :], strict=True))
            space = [*shape, *(x.shape[d] for d in contract[0])]
            a = self.broadcast_in_dim(x, space, [place_x[d] for d in range(x.rank)])
            c = self.broadcast_in_dim(y, space, [place_y[d] for d in range(y.rank)])
            product = self.mul(self.convert(a, dtype), self.convert(c, dtype))
            return self.reduce(product, "add", places[len(shape) :])
        batching = (
            f"batching_dims = {int_list(batch[0])} x {int_list(batch[1])}, "
            if len(batch[0])
            else ""
        )
        out = tensor_type(shape, dtype)
        text = (
            f"stablehlo.dot_general {x.name}, {y.name}, {batching}"
            f"contracting_dims = {int_list(contract[0])} x {int_list(contract[1])}, "
            f"precision = [{self.matmul_precision}, {self.matmul_precision}] "
            f": ({x.type}, {y.type}) -> {out}"
        )
        return self.emit(text, shape, dtype)

    def _untransposed(
        self, x: Value, contract: Sequence[int], batch: Sequence[int]
    ) -> tuple[Value, list[int], list[int]]:
        """The source of a transposed operand with its dims renamed, if its one free dim allows."""
        source = self._transposed.get(x.name)
        if source is None or x.rank - len(contract) - len(batch) > 1:
            return x, list(contract), list(batch)
        value, dims = source
        return value, [dims[d] for d in contract], [dims[d] for d in batch]

    def matmul(self, x: Value, y: Value, dtype: torch.dtype | None = None) -> Value:
        """(…, m, k) @ (…, k, n) with equal leading dims."""
        lead = list(range(x.rank - 2))
        return self.dot_general(x, y, ([x.rank - 1], [y.rank - 2]), (lead, lead), dtype)

    def convolution(
        self,
        x: Value,
        w: Value,
        *,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        groups: int = 1,
        batch_groups: int = 1,
        dims: tuple[str, str, str] | None = None,
        reverse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """N-d convolution. ``dims`` are StableHLO's layouts, e.g. ("bf01", "oi01", "bf01").

        ``dtype`` is the accumulation and result dtype (default: x's).
        """
        dtype = dtype or x.dtype

        def one_pass(a: Value, c: Value) -> Value:
            return self._convolution(
                a,
                c,
                stride,
                padding,
                lhs_dilation,
                rhs_dilation,
                groups,
                batch_groups,
                dims,
                reverse,
                dtype,
            )

        if precision.applies(self, x, w):
            return precision.emulated(self, x, w, one_pass)
        return one_pass(x, w)

    def _convolution(
        self,
        x: Value,
        w: Value,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None,
        rhs_dilation: Sequence[int] | None,
        groups: int,
        batch_groups: int,
        dims: tuple[str, str, str] | None,
        reverse: bool,
        dtype: torch.dtype,
    ) -> Value:
        n = x.rank - 2
        spatial = "".join(map(str, range(n)))
        lhs, rhs, out_dims = dims or ("bf" + spatial, "oi" + spatial, "bf" + spatial)
        lhs_dilation = list(lhs_dilation or [1] * n)
        rhs_dilation = list(rhs_dilation or [1] * n)
        size = {"b": x.shape[lhs.index("b")] // batch_groups, "f": w.shape[rhs.index("o")]}
        for i in range(n):
            length = x.shape[lhs.index(str(i))]
            length = (length - 1) * lhs_dilation[i] + 1 if length else 0
            window = (w.shape[rhs.index(str(i))] - 1) * rhs_dilation[i] + 1
            padded = length + sum(padding[i])
            size[str(i)] = max(0, (padded - window) // stride[i] + 1)
        shape = tuple(size[c] for c in out_dims)
        layout = f"[{', '.join(lhs)}]x[{', '.join(rhs)}]->[{', '.join(out_dims)}]"
        pads = ", ".join(f"[{lo}, {hi}]" for lo, hi in padding)
        flip = f", reverse = [{', '.join(['true'] * n)}]" if reverse else ""
        text = (
            f"stablehlo.convolution({x.name}, {w.name}) dim_numbers = {layout}, window = "
            f"{{stride = {int_list(stride)}, pad = [{pads}], "
            f"lhs_dilate = {int_list(lhs_dilation)}, "
            f"rhs_dilate = {int_list(rhs_dilation)}{flip}}} "
            f"{{batch_group_count = {batch_groups} : i64, feature_group_count = {groups} : i64, "
            f"precision_config = [#stablehlo<precision {self.matmul_precision}>, "
            f"#stablehlo<precision {self.matmul_precision}>]}} "
            f": ({x.type}, {w.type}) -> {tensor_type(shape, dtype)}"
        )
        return self.emit(text, shape, dtype)

    def fft(self, x: Value, kind: str, length: Sequence[int]) -> Value:
        """``kind`` FFT, IFFT, RFFT or IRFFT over the last ``len(length)`` dims (unnormalised except
        that IFFT/IRFFT divide by the length)."""
        shape, dtype = list(x.shape), x.dtype
        if kind == "RFFT":
            shape[-1], dtype = (
                length[-1] // 2 + 1,
                {torch.float32: torch.complex64, torch.float64: torch.complex128}[x.dtype],
            )
        elif kind == "IRFFT":
            shape[-1], dtype = length[-1], REAL_OF_COMPLEX[x.dtype]
        out = tensor_type(shape, dtype)
        text = (
            f"stablehlo.fft {x.name}, type = {kind}, length = {int_list(length)} "
            f": ({x.type}) -> {out}"
        )
        return self.emit(text, shape, dtype)

    def cholesky(self, x: Value, lower: bool = True) -> Value:
        flag = "true" if lower else "false"
        return self.emit(
            f"stablehlo.cholesky {x.name}, lower = {flag} : {x.type}", x.shape, x.dtype
        )

    def triangular_solve(
        self,
        a: Value,
        y: Value,
        *,
        left: bool = True,
        lower: bool = True,
        unit_diagonal: bool = False,
        transpose: str = "NO_TRANSPOSE",
    ) -> Value:
        """Solve op(a) x = y (left) or x op(a) = y; transpose NO_TRANSPOSE | TRANSPOSE | ADJOINT."""
        flags = {"left_side": left, "lower": lower, "unit_diagonal": unit_diagonal}
        attrs = ", ".join(f"{k} = {'true' if v else 'false'}" for k, v in flags.items())
        text = (
            f'"stablehlo.triangular_solve"({a.name}, {y.name}) <{{{attrs}, '
            f"transpose_a = #stablehlo<transpose {transpose}>}}> : ({a.type}, {y.type}) -> {y.type}"
        )
        return self.emit(text, y.shape, y.dtype)
