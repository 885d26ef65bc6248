"""float32 products as a TPU's matrix unit makes them: bfloat16 multiplies, float32 sums.

An operand is split into bfloat16 parts, x = x1 + x2 + x3, each holding 8 more bits. One pass
multiplies the first parts; three passes add x1 y2 and x2 y1; six add x2 y2, x1 y3 and x3 y1. The
products of bfloat16 numbers are exact in float32, so on a device with float32 arithmetic this is
the chip's arithmetic up to the order of the sums. (Henry, Tang and Heinecke, "Leveraging the
bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torch_tpu.lowering.types import Value, tensor_type

if TYPE_CHECKING:
    from torch_tpu.lowering.builder import Builder

# Precision -> pairs of parts to multiply, the small ones first, as they are to be added.
_PASSES: dict[str, list[tuple[int, int]]] = {
    "DEFAULT": [(0, 0)],
    "HIGH": [(0, 1), (1, 0), (0, 0)],
    "HIGHEST": [(0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0)],
}


def applies(b: Builder, x: Value, y: Value) -> bool:
    return b.emulate_precision and x.dtype is torch.float32 and y.dtype is torch.float32


def emulated(b: Builder, x: Value, y: Value, product: Callable[[Value, Value], Value]) -> Value:
    """The sum of the passes of ``product`` that the builder's precision asks for."""
    passes = _PASSES[b.matmul_precision]
    count = 1 + max(i for i, _ in passes)
    left, right = _parts(b, x, count), _parts(b, y, count)
    *small, first = [product(left[i], right[j]) for i, j in passes]
    if not small:
        return first
    total = small[0]
    for term in (*small[1:], first):
        total = b.add(total, term)
    # An infinity times the zero rest of the other operand would be NaN.
    return b.select(_is_finite(b, first), total, first)


def _is_finite(b: Builder, x: Value) -> Value:
    kind = tensor_type(x.shape, torch.bool)
    return b.emit(f"stablehlo.is_finite {x.name} : ({x.type}) -> {kind}", x.shape, torch.bool)


def _parts(b: Builder, x: Value, count: int) -> list[Value]:
    """bfloat16 values, in float32, that add up to x as far as they go."""
    out: list[Value] = []
    rest = x
    for n in range(count):
        part = b.reduce_precision(rest, torch.bfloat16)
        out.append(part)
        if n + 1 < count:
            finite = _is_finite(b, part)
            rest = b.select(finite, b.sub(rest, part), 0)
    return out
