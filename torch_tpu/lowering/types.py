"""Typed SSA values and the dtype table between PyTorch and StableHLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MLIR_DTYPE: dict[torch.dtype, str] = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "ui8",
    torch.uint16: "ui16",
    torch.uint32: "ui32",
    torch.uint64: "ui64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
}

REAL_OF_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
COMPLEX_OF_REAL = {torch.float32: torch.complex64, torch.float64: torch.complex128}
UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
INTEGRAL = UNSIGNED | SIGNED


def int_list(values: Sequence[int]) -> str:
    """Integers as MLIR writes them in a list: ``[1, 2]``."""
    return "[" + ", ".join(map(str, values)) + "]"


def int_array(values: Sequence[int]) -> str:
    """Integers as an MLIR array attribute: ``array<i64: 1, 2>``."""
    return "array<i64: " + ", ".join(map(str, values)) + ">" if values else "array<i64>"


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all of these broadcast to, as torch.broadcast_shapes, which imports sympy.

    Raises RuntimeError where there is none.
    """
    result = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for i in range(-len(shape), 0):
            if result[i] == 1:
                result[i] = shape[i]
            elif shape[i] not in (1, result[i]):
                raise RuntimeError(
                    f"shapes {', '.join(str(tuple(s)) for s in shapes)} do not broadcast: "
                    f"{result[i]} and {shape[i]} at dimension {i}"
                )
    return tuple(result)


class UnsupportedDtypeError(NotImplementedError):
    """An operation that does not exist for a dtype. The CPU decides whether that is an error."""


class LoweringError(RuntimeError):
    """A lowering produced something else than PyTorch's shape and dtype rules ask for."""


@dataclass(frozen=True, slots=True)
class Value:
    """One SSA value: its name in the program text, static shape and torch dtype.

    ``weak`` marks a Python number that travels as an operand: builder operations convert it to
    the dtype of the tensor it meets, as PyTorch does with wrapped numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weak: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> str:
        return tensor_type(self.shape, self.dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_complex(self) -> bool:
        return self.dtype.is_complex

    @property
    def is_bool(self) -> bool:
        return self.dtype is torch.bool

    @property
    def is_unsigned(self) -> bool:
        return self.dtype in UNSIGNED

    @property
    def is_integral(self) -> bool:
        """An integer type, bool excluded."""
        return self.dtype in INTEGRAL


Operand = Value | int | float | bool | complex


def element_type(dtype: torch.dtype) -> str:
    try:
        return MLIR_DTYPE[dtype]
    except KeyError:
        raise NotImplementedError(f"dtype {dtype} is not supported on the tpu device") from None


_SCALAR_TYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def scalar_type(dtype: torch.dtype) -> str:
    """The dtype's name in the errors of PyTorch's C++ code."""
    return _SCALAR_TYPES.get(dtype, str(dtype).removeprefix("torch."))


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> str:
    dims = "".join(f"{d}x" for d in shape)
    return f"tensor<{dims}{element_type(dtype)}>"


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which PyTorch's kernels compute for a tensor of ``dtype``."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return dtype


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return REAL_OF_COMPLEX.get(dtype, dtype)


def canonical_dim(dim: int, rank: int) -> int:
    """``dim`` in [0, max(rank, 1)); PyTorch treats a 0-d tensor as 1-d here.

    Raises IndexError in PyTorch's words when out of range.
    """
    span = max(rank, 1)
    if not -span <= dim < span:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-span}, {span - 1}], "
            f"but got {dim})"
        )
    return dim % span


def canonical_dims(dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Reduction dims as a sorted tuple; None or an empty list mean all dims."""
    if dim is None:
        return tuple(range(rank))
    if isinstance(dim, int):
        dim = [dim]
    if len(dim) == 0:
        return tuple(range(rank))
    dims = sorted({canonical_dim(d, rank) for d in dim})
    return tuple(d for d in dims if d < rank)
