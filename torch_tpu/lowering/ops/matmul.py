"""Matrix products. Half inputs multiply as they are and accumulate in float32; one rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.activation import gelu_value
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype

Dims = Sequence[int]


def contract(
    b: OpBuilder,
    x: Value,
    y: Value,
    dims: tuple[Dims, Dims],
    batch: tuple[Dims, Dims] = ((), ()),
    dtype: torch.dtype | None = None,
) -> Value:
    """``dot_general`` accumulated in ``dtype``, by default float32 for half inputs."""
    return b.dot_general(x, y, dims, batch, dtype or opmath_dtype(x.dtype))


def _product(b: OpBuilder, x: Value, y: Value, dtype: torch.dtype | None = None) -> Value:
    """(…, m, k) @ (…, k, n) in the accumulation dtype."""
    lead = list(range(x.rank - 2))
    return contract(b, x, y, ([x.rank - 1], [y.rank - 2]), (lead, lead), dtype)


def blend(b: OpBuilder, bias: Value, product: Value, beta: Operand, alpha: Operand) -> Value:
    """beta * bias + alpha * product in product's dtype, rounded to the result's.

    As in BLAS, a zero ``beta`` ignores the bias even where it is NaN.
    """
    dtype = product.dtype
    total = b.mul(product, alpha)
    if isinstance(beta, Value):
        factor = b.as_value(beta, dtype)
        scaled = b.mul(b.convert(bias, dtype), factor)
        addend = b.select(b.eq(factor, 0), 0, scaled)
    elif beta == 0:
        return b.convert(b.broadcast_to(total, b.out_shape), b.out_dtype)
    else:
        addend = b.mul(b.convert(bias, dtype), beta)
    return b.convert(b.add(total, b.broadcast_to(addend, total.shape)), b.out_dtype)


def rounded_once(b: OpBuilder, x: Value) -> torch.dtype | None:
    """The result dtype of a product that nothing is added to; None for the accumulation dtype.

    A TPU's matrix unit sums bfloat16 products in float32 and rounds the result itself. Saying so
    keeps the result narrow for what moves it, such as a collective.
    """
    return x.dtype if b.target == "tpu" and x.dtype is torch.bfloat16 else None


@lower("aten.mm", "aten.bmm")
def mm(b: OpBuilder, x: Value, y: Value, out_dtype: torch.dtype | None = None) -> Value:
    return b.convert(_product(b, x, y, out_dtype or rounded_once(b, x)), b.out_dtype)


@lower("aten.addmm", "aten.baddbmm")
def addmm(
    b: OpBuilder,
    bias: Value,
    x: Value,
    y: Value,
    out_dtype: torch.dtype | None = None,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    return blend(b, bias, _product(b, x, y, out_dtype), beta, alpha)


@lower("aten._addmm_activation")
def addmm_activation(
    b: OpBuilder,
    bias: Value,
    x: Value,
    y: Value,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
    use_gelu: bool = False,
) -> Value:
    """addmm followed by ReLU or GELU."""
    total = b.convert(addmm(b, bias, x, y, beta=beta, alpha=alpha), opmath_dtype(x.dtype))
    out = gelu_value(b, total, "none") if use_gelu else b.maximum(total, 0)
    return b.convert(out, b.out_dtype)


@lower("aten.addbmm")
def addbmm(
    b: OpBuilder, bias: Value, x: Value, y: Value, *, beta: Operand = 1, alpha: Operand = 1
) -> Value:
    """The batch is one more contracted dim."""
    left = b.transpose(x, [1, 0, 2])
    return blend(b, bias, contract(b, left, y, ([1, 2], [0, 1])), beta, alpha)


@lower("aten.addmv")
def addmv(
    b: OpBuilder, bias: Value, x: Value, vec: Value, *, beta: Operand = 1, alpha: Operand = 1
) -> Value:
    return blend(b, bias, contract(b, x, vec, ([1], [0])), beta, alpha)


@lower("aten.mv")
def mv(b: OpBuilder, x: Value, vec: Value) -> Value:
    return b.convert(contract(b, x, vec, ([1], [0])), b.out_dtype)


@lower("aten.dot")
def dot(b: OpBuilder, x: Value, y: Value) -> Value:
    return b.convert(contract(b, x, y, ([0], [0])), b.out_dtype)


@lower("aten.vdot")
def vdot(b: OpBuilder, x: Value, y: Value) -> Value:
    return b.convert(contract(b, b.conj(x), y, ([0], [0])), b.out_dtype)


@lower("aten.addr")
def addr(
    b: OpBuilder, bias: Value, x: Value, y: Value, *, beta: Operand = 1, alpha: Operand = 1
) -> Value:
    dtype = opmath_dtype(b.out_dtype)
    column = b.unsqueeze(b.convert(x, dtype), 1)
    row = b.unsqueeze(b.convert(y, dtype), 0)
    return blend(b, bias, b.mul(column, row), beta, alpha)


# -- linear layers -----------------------------------------------------------------------------


@lower("aten.linear")
def linear(b: OpBuilder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x (…, in) times weight (out, in) transposed, plus bias (out,)."""
    dtype = rounded_once(b, x) if bias is None else None
    product = contract(b, x, weight, ([x.rank - 1], [weight.rank - 1]), dtype=dtype)
    if bias is not None:
        product = b.add(product, b.broadcast_to(b.convert(bias, product.dtype), product.shape))
    return b.convert(product, b.out_dtype)


@lower("aten.linear_backward")
def linear_backward(
    b: OpBuilder, x: Value, grad: Value, weight: Value, output_mask: Sequence[bool]
) -> list[Value]:
    """Gradients of x, weight and bias; only those that ``output_mask`` asks for."""
    want_x, want_weight, want_bias = output_mask
    lead = list(range(grad.rank - 1))
    out: list[Value] = []
    if want_x:
        out.append(b.convert(contract(b, grad, weight, ([grad.rank - 1], [0])), x.dtype))
    if want_weight or want_bias:
        rows = b.convert(contract(b, grad, x, (lead, lead)), weight.dtype)
        total = b.reduce(b.convert(grad, opmath_dtype(grad.dtype)), "add", lead)
        out += [rows, b.convert(total, weight.dtype)]
    return out


# -- narrow integers and floats ----------------------------------------------------------------


@lower("aten._int_mm")
def int_mm(b: OpBuilder, x: Value, y: Value) -> Value:
    """int8 @ int8 accumulated in int32."""
    return _product(b, x, y, torch.int32)


@lower("aten._weight_int8pack_mm")
def weight_int8pack_mm(b: OpBuilder, x: Value, weight: Value, scales: Value) -> Value:
    """x (m, k) @ int8 weight (n, k) transposed, columns scaled by ``scales`` (n,)."""
    wide = opmath_dtype(x.dtype)
    product = contract(b, x, b.convert(weight, x.dtype), ([1], [1]))
    scaled = b.mul(product, b.broadcast_to(b.convert(scales, wide), product.shape))
    return b.convert(scaled, b.out_dtype)


@lower("aten._scaled_mm.default")
def scaled_mm(
    b: OpBuilder,
    x: Value,
    y: Value,
    scale_x: Value,
    scale_y: Value,
    bias: Value | None = None,
    scale_result: Value | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Value:
    """float8 product with per-tensor or per-row/column float32 scales.

    The scales are multipliers of the operands: a scalar each, or (m, 1) and (1, n).
    """
    wide = torch.float32
    product = _product(b, b.convert(x, torch.bfloat16), b.convert(y, torch.bfloat16), wide)
    for scale in (scale_x, scale_y):
        if math.prod(scale.shape) == 1:
            scale = b.reshape(scale, ())
        product = b.mul(product, b.broadcast_to(b.convert(scale, wide), product.shape))
    if bias is not None:
        product = b.add(product, b.broadcast_to(b.convert(bias, wide), product.shape))
    if scale_result is not None and b.out_dtype.itemsize == 1:
        product = b.mul(product, b.reshape(b.convert(scale_result, wide), ()))
    return b.convert(product, b.out_dtype)
