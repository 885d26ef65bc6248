"""The pointwise half of LSTM and GRU cells, which PyTorch's composite RNNs call on devices.

Gates arrive as two products (of the input and of the hidden state) side by side along dim 1.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype


def _with_bias(b: OpBuilder, gates: Value, bias: Value | None) -> Value:
    wide = b.convert(gates, opmath_dtype(gates.dtype))
    return (
        wide
        if bias is None
        else b.add(wide, b.broadcast_to(b.convert(bias, wide.dtype), wide.shape))
    )


def _split(b: OpBuilder, x: Value, parts: int) -> list[Value]:
    width = x.shape[1] // parts
    return [b.slice_dim(x, 1, i * width, (i + 1) * width) for i in range(parts)]


def _sigmoid_slope(b: OpBuilder, y: Value) -> Value:
    return b.mul(y, b.sub(1, y))


def _tanh_slope(b: OpBuilder, y: Value) -> Value:
    return b.sub(1, b.mul(y, y))


# -- LSTM: gates in the order input, forget, cell, output --------------------------------------

Spec = tuple[tuple[int, ...], torch.dtype]
OptionalSpecs = list[Spec | None]


def _lstm_specs(input_gates: Value, hidden_gates: Value, cx: Value, *_: Any) -> list[Spec]:
    return [(cx.shape, cx.dtype), (cx.shape, cx.dtype), (input_gates.shape, input_gates.dtype)]


# PyTorch's own shape rule takes no absent bias.
@lower("aten._thnn_fused_lstm_cell", specs=_lstm_specs)
def lstm_cell(
    b: OpBuilder,
    input_gates: Value,
    hidden_gates: Value,
    cx: Value,
    input_bias: Value | None = None,
    hidden_bias: Value | None = None,
) -> tuple[Value, Value, Value]:
    """Gates (N, 4 H), cell state (N, H); returns hy, cy and the activated gates (N, 4 H)."""
    total = b.add(_with_bias(b, input_gates, input_bias), _with_bias(b, hidden_gates, hidden_bias))
    i, f, g, o = _split(b, total, 4)
    i, f, g, o = b.sigmoid(i), b.sigmoid(f), b.tanh(g), b.sigmoid(o)
    cy = b.add(b.mul(f, b.convert(cx, total.dtype)), b.mul(i, g))
    hy = b.mul(o, b.tanh(cy))
    workspace = b.concatenate([i, f, g, o], 1)
    return tuple(b.convert(v, cx.dtype) for v in (hy, cy, workspace))  # type: ignore[return-value]


@lower("aten._thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    b: OpBuilder,
    grad_hy: Value | None,
    grad_cy: Value | None,
    cx: Value,
    cy: Value,
    workspace: Value,
    has_bias: bool,
) -> list[Value]:
    """Gradients of the summed gates (N, 4 H), of cx and, with ``has_bias``, of the bias (4 H,)."""
    dtype = opmath_dtype(workspace.dtype)
    if grad_hy is None and grad_cy is None:
        return []
    i, f, g, o = _split(b, b.convert(workspace, dtype), 4)
    old = b.convert(cx, dtype)
    t = b.tanh(b.convert(cy, dtype))
    zero = b.constant(0, dtype, cx.shape)
    dh = zero if grad_hy is None else b.convert(grad_hy, dtype)
    dc = b.mul(b.mul(dh, o), _tanh_slope(b, t))
    if grad_cy is not None:
        dc = b.add(dc, b.convert(grad_cy, dtype))
    gates = b.concatenate(
        [
            b.mul(b.mul(dc, g), _sigmoid_slope(b, i)),
            b.mul(b.mul(dc, old), _sigmoid_slope(b, f)),
            b.mul(b.mul(dc, i), _tanh_slope(b, g)),
            b.mul(b.mul(dh, t), _sigmoid_slope(b, o)),
        ],
        1,
    )
    out = [b.convert(gates, workspace.dtype), b.convert(b.mul(dc, f), cx.dtype)]
    if has_bias:
        out.append(b.convert(b.reduce(gates, "add", [0]), workspace.dtype))
    return out


# -- GRU: gates in the order reset, update, new ------------------------------------------------


def _gru_specs(input_gates: Value, hidden_gates: Value, hx: Value, *_: Any) -> list[Spec]:
    batch, width = hx.shape
    return [(hx.shape, hx.dtype), ((batch, 5 * width), hx.dtype)]


@lower("aten._thnn_fused_gru_cell", specs=_gru_specs)
def gru_cell(
    b: OpBuilder,
    input_gates: Value,
    hidden_gates: Value,
    hx: Value,
    input_bias: Value | None = None,
    hidden_bias: Value | None = None,
) -> tuple[Value, Value]:
    """Gates (N, 3 H), hidden state (N, H); returns hy and what the backward needs (N, 5 H)."""
    ir, iz, new = _split(b, _with_bias(b, input_gates, input_bias), 3)
    hr, hz, hidden_new = _split(b, _with_bias(b, hidden_gates, hidden_bias), 3)
    r, z = b.sigmoid(b.add(ir, hr)), b.sigmoid(b.add(iz, hz))
    n = b.tanh(b.add(new, b.mul(r, hidden_new)))
    old = b.convert(hx, n.dtype)
    hy = b.add(n, b.mul(z, b.sub(old, n)))
    workspace = b.concatenate([r, z, n, old, hidden_new], 1)
    return b.convert(hy, hx.dtype), b.convert(workspace, hx.dtype)


def _gru_backward_specs(grad_hy: Value, workspace: Value, has_bias: bool) -> OptionalSpecs:
    batch, width = grad_hy.shape
    dtype = workspace.dtype
    gates = ((batch, 3 * width), dtype)
    bias = ((3 * width,), dtype) if has_bias else None
    return [gates, gates, (grad_hy.shape, dtype), bias, bias]


@lower("aten._thnn_fused_gru_cell_backward", specs=_gru_backward_specs)
def gru_cell_backward(
    b: OpBuilder, grad_hy: Value, workspace: Value, has_bias: bool
) -> list[Value]:
    """Gradients of both gate products, of hx and, with ``has_bias``, of both biases."""
    dtype = opmath_dtype(workspace.dtype)
    r, z, n, old, hidden_new = _split(b, b.convert(workspace, dtype), 5)
    dh = b.convert(grad_hy, dtype)
    dn = b.mul(b.mul(dh, b.sub(1, z)), _tanh_slope(b, n))
    dz = b.mul(b.mul(dh, b.sub(old, n)), _sigmoid_slope(b, z))
    dr = b.mul(b.mul(dn, hidden_new), _sigmoid_slope(b, r))
    from_input = b.concatenate([dr, dz, dn], 1)
    from_hidden = b.concatenate([dr, dz, b.mul(dn, r)], 1)
    out = [from_input, from_hidden, b.mul(dh, z)]
    if has_bias:
        out += [b.reduce(from_input, "add", [0]), b.reduce(from_hidden, "add", [0])]
    return [b.convert(v, workspace.dtype) for v in out]
