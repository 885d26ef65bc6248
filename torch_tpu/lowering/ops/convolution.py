"""Convolutions of one to three spatial dims, transposed or not, and their gradients.

All are one of two contractions: ``correlate`` (output and input gradient) and ``weight_gradient``.
For the TPU both are a single ``stablehlo.convolution``. XLA:CPU has a fast path only for plain 1-d
and 2-d convolutions without groups, so there the other cases are written through that one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import LoweringError, Value, opmath_dtype

Ints = Sequence[int]
Pads = Sequence[tuple[int, int]]

# Up to this many groups are worth one convolution each.
_MOST_SPLITS = 64
# Patch matrices (channels * window elements) of at most this many rows make the output and the
# weight gradient matrix products.
_SMALL_PATCH = 64
_LARGE_PATCH = 160
# Windows of depthwise convolutions of at most this many elements are unrolled.
_MOST_TAPS = 128
# So many elements of a depthwise weight gradient's window are one kernel.
_TAPS_A_REDUCTION = 16


def _expand(values: Ints, n: int) -> list[int]:
    """Options may come as one number for all spatial dims."""
    return list(values) * n if len(values) == 1 else list(values)


def _crop_pad(b: OpBuilder, x: Value, pads: Pads, dilation: Ints) -> Value:
    """Zero-pad (or crop, where negative) the spatial dims after putting ``dilation`` between."""
    low = [0, 0, *(lo for lo, _ in pads)]
    high = [0, 0, *(hi for _, hi in pads)]
    return b.pad(x, 0, low, high, [0, 0, *(d - 1 for d in dilation)])


# -- output and input gradient -----------------------------------------------------------------


def correlate(
    b: OpBuilder,
    x: Value,
    w: Value,
    *,
    stride: Ints,
    pads: Pads,
    spread: Ints,
    dilation: Ints,
    groups: int,
) -> Value:
    """x (N, C, *s) with w (O, C / groups, *k) -> (N, O, *s') in the accumulation dtype.

    ``spread`` is the dilation of x (the stride of the convolution that is being transposed),
    ``pads`` may be negative.
    """
    dtype = opmath_dtype(x.dtype)
    n = x.rank - 2
    exact = dtype is torch.int64 and b.target != "cpu"  # no TPU convolution has 64-bit integers
    if b.target != "cpu" and not exact:
        return b.convolution(
            x,
            w,
            stride=stride,
            padding=pads,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            groups=groups,
            dtype=dtype,
        )
    x, w = b.convert(x, dtype), b.convert(w, dtype)
    if any(lo < 0 or hi < 0 for lo, hi in pads) or (n == 3 and any(s > 1 for s in spread)):
        x, pads, spread = _crop_pad(b, x, pads, spread), [(0, 0)] * n, [1] * n
    channels = x.shape[1]
    if groups == channels > 1 and math.prod(w.shape[2:]) <= _MOST_TAPS:
        x = _crop_pad(b, x, pads, spread)
        return _depthwise(b, x, w, stride, dilation)
    if groups > 1 and (exact or groups <= _MOST_SPLITS):
        wide, out = channels // groups, w.shape[0] // groups
        parts = [
            correlate(
                b,
                b.slice_dim(x, 1, i * wide, (i + 1) * wide),
                b.slice_dim(w, 0, i * out, (i + 1) * out),
                stride=stride,
                pads=pads,
                spread=spread,
                dilation=dilation,
                groups=1,
            )
            for i in range(groups)
        ]
        return b.concatenate(parts, 1)
    if exact:
        return _from_patches(b, _crop_pad(b, x, pads, spread), w, stride, dilation)
    if n == 3 and groups == 1:
        return _volume(b, x, w, stride, pads, dilation)
    area = math.prod(w.shape[2:])
    if groups == 1 and area == 1 and max(spread) == 1:
        return _pointwise(b, _sample(b, x, pads, stride), w)
    if groups == 1 and area * channels <= _SMALL_PATCH and n < 3:
        return _from_patches(b, _crop_pad(b, x, pads, spread), w, stride, dilation)
    return b.convolution(
        x,
        w,
        stride=stride,
        padding=pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        groups=groups,
    )


def _sample(b: OpBuilder, x: Value, pads: Pads, stride: Ints) -> Value:
    """What a window of size 1 sees."""
    x = _crop_pad(b, x, pads, [1] * len(pads))
    return b.slice(x, [0] * x.rank, x.shape, [1, 1, *stride])


def _pointwise(b: OpBuilder, x: Value, w: Value) -> Value:
    """A window of size 1 is a matrix product over the channels."""
    batch, channels, *spatial = x.shape
    flat = b.reshape(x, (batch, channels, math.prod(spatial)))
    y = b.dot_general(b.reshape(w, (w.shape[0], channels)), flat, ([1], [1]))
    return b.reshape(b.transpose(y, [1, 0, 2]), (batch, w.shape[0], *spatial))


def _taps(b: OpBuilder, x: Value, window: Ints, stride: Ints, dilation: Ints) -> list[Value]:
    """For each window offset, row-major, the elements of (padded) x that it meets."""
    sizes = _positions(x.shape[2:], window, stride, dilation)
    out = []
    for offset in itertools.product(*(range(k) for k in window)):
        start = [o * d for o, d in zip(offset, dilation, strict=True)]
        limit = [a + (m - 1) * s + 1 for a, m, s in zip(start, sizes, stride, strict=True)]
        out.append(b.slice(x, [0, 0, *start], [*x.shape[:2], *limit], [1, 1, *stride]))
    return out


def _patches(b: OpBuilder, x: Value, window: Ints, stride: Ints, dilation: Ints) -> Value:
    """The elements of (padded) x under each window: (N, C * area, positions)."""
    taps = _taps(b, x, window, stride, dilation)
    rows = taps[0] if len(taps) == 1 else b.stack(taps, 2)
    length = math.prod(taps[0].shape[2:])
    return b.reshape(rows, (x.shape[0], x.shape[1] * len(taps), length))


def _from_patches(b: OpBuilder, x: Value, w: Value, stride: Ints, dilation: Ints) -> Value:
    """A convolution of few channels as one matrix product for each image."""
    sizes = _positions(x.shape[2:], w.shape[2:], stride, dilation)
    rows = _patches(b, x, w.shape[2:], stride, dilation)
    matrix = b.reshape(w, (w.shape[0], rows.shape[1]))
    each = b.broadcast_in_dim(matrix, (x.shape[0], *matrix.shape), [1, 2])
    y = b.dot_general(each, rows, ([2], [1]), ([0], [0]))
    return b.reshape(y, (x.shape[0], w.shape[0], *sizes))


def _positions(sizes: Ints, window: Ints, stride: Ints, dilation: Ints) -> list[int]:
    return [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, s, d in zip(sizes, window, stride, dilation, strict=True)
    ]


def _depthwise(b: OpBuilder, x: Value, w: Value, stride: Ints, dilation: Ints) -> Value:
    """One window per channel: a fused sum of shifted products."""
    channels, many = x.shape[1], w.shape[0] // x.shape[1]
    total = None
    offsets = itertools.product(*(range(k) for k in w.shape[2:]))
    for offset, tap in zip(offsets, _taps(b, x, w.shape[2:], stride, dilation), strict=True):
        limit = [o + 1 for o in offset]
        factor = b.slice(w, [0, 0, *offset], [w.shape[0], 1, *limit])
        shape = (tap.shape[0], channels, many, *tap.shape[2:])
        spatial = range(3, len(shape))
        left = b.broadcast_in_dim(tap, shape, [0, 1, *spatial])
        right = b.broadcast_in_dim(b.reshape(factor, (channels, many)), shape, [1, 2])
        product = b.mul(left, right)
        total = product if total is None else b.add(total, product)
    if total is None:
        raise LoweringError("convolution with an empty window")
    return b.reshape(total, (total.shape[0], w.shape[0], *total.shape[3:]))


def _depth_slices(b: OpBuilder, x: Value, count: int, stride: int, dilation: int) -> list[Value]:
    """For each depth offset of a 3-d window, the planes it meets: (N, C, D', H, W)."""
    depth = (x.shape[2] - (count - 1) * dilation - 1) // stride + 1
    return [
        b.slice_dim(x, 2, i * dilation, i * dilation + (depth - 1) * stride + 1, stride)
        for i in range(count)
    ]


def _planes(b: OpBuilder, x: Value) -> Value:
    """(N, C, D, H, W) as N * D planes (N * D, C, H, W)."""
    batch, channels, depth, height, width = x.shape
    return b.reshape(b.transpose(x, [0, 2, 1, 3, 4]), (batch * depth, channels, height, width))


def _volume(b: OpBuilder, x: Value, w: Value, stride: Ints, pads: Pads, dilation: Ints) -> Value:
    """A 3-d window as a 2-d one whose channels include the window's depth."""
    x = _crop_pad(b, x, [pads[0], (0, 0), (0, 0)], [1, 1, 1])
    out_channels, channels, count, height, width = w.shape
    slices = _depth_slices(b, x, count, stride[0], dilation[0])
    depth = slices[0].shape[2]
    planes = b.concatenate([_planes(b, s) for s in slices], 1)
    flat = b.reshape(
        b.transpose(w, [0, 2, 1, 3, 4]), (out_channels, count * channels, height, width)
    )
    y = correlate(
        b,
        planes,
        flat,
        stride=stride[1:],
        pads=pads[1:],
        spread=[1, 1],
        dilation=dilation[1:],
        groups=1,
    )
    y = b.reshape(y, (x.shape[0], depth, *y.shape[1:]))
    return b.transpose(y, [0, 2, 1, 3, 4])


def _transposed_weight(b: OpBuilder, w: Value, groups: int) -> Value:
    """The flipped window with input and output channels swapped inside each group."""
    w = b.reverse(w, range(2, w.rank))
    first, second, *window = w.shape
    w = b.reshape(w, (groups, first // groups, second, *window))
    w = b.transpose(w, [0, 2, 1, *range(3, w.rank)])
    return b.reshape(w, (groups * second, first // groups, *window))


def correlate_transposed(
    b: OpBuilder,
    g: Value,
    w: Value,
    sizes: Ints,
    *,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> Value:
    """The adjoint of the convolution that w (of g's channels first) defines.

    ``sizes`` are the spatial sizes of the result.
    """
    pads = []
    for n, m, k, s, p, d in zip(
        sizes, g.shape[2:], w.shape[2:], stride, padding, dilation, strict=True
    ):
        pads.append((d * (k - 1) - p, n - (m - 1) * s - 1 + p))
    return correlate(
        b,
        g,
        _transposed_weight(b, w, groups),
        stride=[1] * len(sizes),
        pads=pads,
        spread=stride,
        dilation=dilation,
        groups=groups,
    )


# -- weight gradient ---------------------------------------------------------------------------


def weight_gradient(
    b: OpBuilder,
    x: Value,
    g: Value,
    window: Ints,
    *,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> Value:
    """x (N, C, *s) and the output's gradient g (N, O, *s') -> (O, C / groups, *window)."""
    dtype = opmath_dtype(x.dtype)
    n = x.rank - 2
    pads = []
    for size, m, k, s, p, d in zip(
        x.shape[2:], g.shape[2:], window, stride, padding, dilation, strict=True
    ):
        pads.append((p, (k - 1) * d + (m - 1) * s + 1 - size - p))
    if b.target != "cpu":
        return _swapped(b, x, g, stride, pads, dilation, groups, dtype)
    x, g = b.convert(x, dtype), b.convert(g, dtype)
    channels, out = x.shape[1], g.shape[1]
    area = math.prod(window)
    if groups == channels > 1 and area <= _MOST_TAPS:
        taps = _taps(b, _crop_pad(b, x, pads, [1] * n), window, stride, dilation)
        return _depthwise_gradient(b, taps, g, window)
    if 1 < groups <= _MOST_SPLITS:
        wide, many = channels // groups, out // groups
        parts = [
            weight_gradient(
                b,
                b.slice_dim(x, 1, i * wide, (i + 1) * wide),
                b.slice_dim(g, 1, i * many, (i + 1) * many),
                window,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=1,
            )
            for i in range(groups)
        ]
        return b.concatenate(parts, 0)
    if n == 3 and groups == 1:
        x = _crop_pad(b, x, [pads[0], (0, 0), (0, 0)], [1, 1, 1])
        planes = [
            weight_gradient(
                b,
                _planes(b, s),
                _planes(b, g),
                window[1:],
                stride=stride[1:],
                padding=padding[1:],
                dilation=dilation[1:],
                groups=1,
            )
            for s in _depth_slices(b, x, window[0], stride[0], dilation[0])
        ]
        return b.stack(planes, 2)
    if groups == 1 and (area == 1 or area * channels <= _LARGE_PATCH):
        rows = _patches(b, _crop_pad(b, x, pads, [1] * n), window, stride, dilation)
        flat = b.reshape(g, (g.shape[0], out, rows.shape[2]))
        if area == 1:
            total = b.dot_general(flat, rows, ([0, 2], [0, 2]))
        else:
            total = b.reduce(b.dot_general(flat, rows, ([2], [2]), ([0], [0])), "add", [0])
        return b.reshape(total, (out, channels, *window))
    if any(hi < 0 for _, hi in pads):
        x, pads = (
            _crop_pad(b, x, [(0, min(hi, 0)) for _, hi in pads], [1] * n),
            [(lo, max(hi, 0)) for lo, hi in pads],
        )
    return _swapped(b, x, g, stride, pads, dilation, groups, dtype)


def _swapped(
    b: OpBuilder,
    x: Value,
    g: Value,
    stride: Ints,
    pads: Pads,
    dilation: Ints,
    groups: int,
    dtype: torch.dtype,
) -> Value:
    """x's batch is contracted, g is the (strided) window, the outputs are the window's offsets."""
    spatial = "".join(map(str, range(x.rank - 2)))
    return b.convolution(
        x,
        g,
        stride=dilation,
        padding=pads,
        rhs_dilation=stride,
        batch_groups=groups,
        dims=("fb" + spatial, "io" + spatial, "fb" + spatial),
        dtype=dtype,
    )


def _depthwise_gradient(b: OpBuilder, taps: list[Value], g: Value, window: Ints) -> Value:
    channels = taps[0].shape[1]
    many = g.shape[1] // channels
    shape = (g.shape[0], channels, many, *g.shape[2:])
    spatial = list(range(3, len(shape)))
    grad = b.reshape(g, shape)
    sums: list[Value] = []
    for first in range(0, len(taps), _TAPS_A_REDUCTION):
        some = taps[first : first + _TAPS_A_REDUCTION]
        sums += b.reduce_general(
            [b.mul(b.broadcast_in_dim(t, shape, [0, 1, *spatial]), grad) for t in some],
            [b.constant(0, grad.dtype)] * len(some),
            [0, *spatial],
            lambda *v: [b.add(v[i], v[len(v) // 2 + i]) for i in range(len(v) // 2)],
        )
    return b.reshape(b.stack(sums, 2), (channels * many, 1, *window))


# -- the ops -----------------------------------------------------------------------------------


def _check_geometry(stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints) -> None:
    """What PyTorch checks before it picks a kernel."""
    if any(p < 0 for p in padding):
        raise RuntimeError("negative padding is not supported")
    if any(p < 0 for p in output_padding):
        raise RuntimeError("negative output_padding is not supported")
    if any(s <= 0 for s in stride):
        raise RuntimeError("non-positive stride is not supported")
    if any(d <= 0 for d in dilation):
        raise RuntimeError("dilation should be greater than zero")


@lower("aten.convolution")
def convolution(
    b: OpBuilder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Value:
    """x (N, C, *s); weight (O, C / groups, *k), or (C, O / groups, *k) when transposed."""
    n = x.rank - 2
    stride, padding, dilation = (_expand(v, n) for v in (stride, padding, dilation))
    _check_geometry(stride, padding, dilation, output_padding)
    dtype = opmath_dtype(x.dtype)
    if x.numel == 0 or weight.numel == 0:
        y = b.constant(0, dtype, b.out_shape)
    elif transposed:
        y = correlate_transposed(
            b,
            x,
            weight,
            b.out_shape[2:],
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
    else:
        y = correlate(
            b,
            x,
            weight,
            stride=stride,
            pads=[(p, p) for p in padding],
            spread=[1] * n,
            dilation=dilation,
            groups=groups,
        )
    if bias is not None:
        y = b.add(y, b.broadcast_in_dim(b.convert(bias, dtype), y.shape, [1]))
    return b.convert(y, b.out_dtype)


def _output_specs(
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    n = x.rank - 2
    sizes = []
    options = (_expand(v, n) for v in (stride, padding, dilation, output_padding))
    for size, k, s, p, d, extra in zip(x.shape[2:], weight.shape[2:], *options, strict=True):
        reach = d * (k - 1)
        if transposed:
            sizes.append((size - 1) * s - 2 * p + reach + extra + 1)
        else:
            sizes.append((size + 2 * p - reach - 1) // s + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return [((x.shape[0], channels, *sizes), x.dtype)]


# PyTorch calls this name on devices of other vendors, without a shape rule.
lower("aten.convolution_overrideable", specs=_output_specs)(convolution)


def _gradients(
    b: OpBuilder,
    grad: Value,
    x: Value,
    weight: Value,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Value]:
    n = x.rank - 2
    options: dict[str, Any] = {
        "stride": _expand(stride, n),
        "padding": _expand(padding, n),
        "dilation": _expand(dilation, n),
        "groups": groups,
    }
    wide = opmath_dtype(x.dtype)
    empty = x.numel == 0 or grad.numel == 0 or weight.numel == 0
    out: list[Value] = []
    if output_mask[0]:
        if empty:
            value = b.constant(0, wide, x.shape)
        elif transposed:
            value = correlate(
                b,
                grad,
                weight,
                stride=options["stride"],
                pads=_forward_pads(grad, x, weight, options),
                spread=[1] * n,
                dilation=options["dilation"],
                groups=groups,
            )
        else:
            value = correlate_transposed(b, grad, weight, x.shape[2:], **options)
        out.append(b.convert(value, x.dtype))
    if output_mask[1]:
        if empty:
            value = b.constant(0, wide, weight.shape)
        else:
            image, signal = (grad, x) if transposed else (x, grad)
            value = weight_gradient(b, image, signal, weight.shape[2:], **options)
        out.append(b.convert(value, weight.dtype))
    if output_mask[2]:
        total = b.reduce(b.convert(grad, wide), "add", [0, *range(2, grad.rank)])
        out.append(b.convert(total, b.results[len(out)][1]))
    return out


def _forward_pads(image: Value, result: Value, weight: Value, options: dict[str, Any]) -> Pads:
    """Padding of a forward convolution that yields exactly ``result``'s spatial sizes."""
    pads = []
    for size, m, k, s, p, d in zip(
        image.shape[2:],
        result.shape[2:],
        weight.shape[2:],
        options["stride"],
        options["padding"],
        options["dilation"],
        strict=True,
    ):
        pads.append((p, (k - 1) * d + (m - 1) * s + 1 - size - p))
    return pads


@lower("aten.convolution_backward")
def convolution_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Value]:
    """Gradients of input, weight and bias: only those that ``output_mask`` asks for."""
    return _gradients(
        b, grad, x, weight, stride, padding, dilation, transposed, groups, output_mask
    )


def _backward_specs(
    grad: Value, x: Value, weight: Value, *options: Any
) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
    shapes = (x.shape, weight.shape, (grad.shape[1],))
    return [(s, x.dtype) if wanted else None for s, wanted in zip(shapes, options[-1], strict=True)]


@lower("aten.convolution_backward_overrideable", specs=_backward_specs)
def convolution_backward_overrideable(
    b: OpBuilder,
    grad: Value,
    x: Value,
    weight: Value,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Value]:
    return _gradients(
        b, grad, x, weight, stride, padding, dilation, transposed, groups, output_mask
    )
