"""Comparisons and logic: results are bool, operands meet in their common dtype."""

from __future__ import annotations

from collections.abc import Callable

from torch_tpu.lowering.builder import Builder
from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import pointwise
from torch_tpu.lowering.types import Operand, Value

Binary = Callable[[OpBuilder, Operand, Operand], Value]

_COMPARISONS: dict[str, Binary] = {
    "eq": Builder.eq,
    "ne": Builder.ne,
    "lt": Builder.lt,
    "le": Builder.le,
    "gt": Builder.gt,
    "ge": Builder.ge,
}
for _name, _fn in _COMPARISONS.items():
    pointwise(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", promote="operands", opmath=False)(_fn)
    pointwise(f"prims.{_name}", promote="operands", opmath=False)(_fn)

# Promotion to the bool result is the truth value of each operand.
_LOGIC: dict[str, Binary] = {
    "logical_and": Builder.and_,
    "logical_or": Builder.or_,
    "logical_xor": Builder.xor,
}
for _name, _fn in _LOGIC.items():
    pointwise(f"aten.{_name}")(_fn)


@pointwise("aten.logical_not")
def logical_not(b: OpBuilder, x: Value) -> Value:
    return b.not_(x)
