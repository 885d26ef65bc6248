"""Conversions and copies as functions: the result is the source in another dtype or shape."""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value


@lower("aten._to_copy", "prims.device_put")
def to_copy(b: OpBuilder, x: Value, *_: object) -> Value:
    # A graph may hold a Python number where the schema has a tensor.
    return b.convert(b.as_value(x, b.out_dtype), b.out_dtype)


@lower("prims.convert_element_type")
def convert_element_type(b: OpBuilder, x: Value, dtype: torch.dtype) -> Value:
    return b.convert(x, dtype)


@lower("aten.copy")
def copy(b: OpBuilder, x: Value, src: Value) -> Value:
    """``src`` in the dtype and shape of ``x``."""
    return b.broadcast_to(b.convert(src, x.dtype), x.shape)


@lower("aten.clone", "prims.clone", "aten.lift")
def clone(b: OpBuilder, x: Value) -> Value:
    return x


@lower("prims.copy_strided")
def copy_strided(b: OpBuilder, x: Value, stride: list[int]) -> Value:
    """Values have no strides; the caller of a program decides the layout of its results."""
    return x
