"""Checks that PyTorch's CPU kernels make themselves, in their exception classes and words.

A boxed kernel of a device stands where those kernels would, so they have to be repeated. Each
function takes the bound arguments of its overload (tensors need only shape and dtype) and raises.
Numbers that travel as operands are checked here too: call the checks on every call, not only when
a program is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.lowering.types import scalar_type

Check = Callable[..., None]

#: Overload name ("aten.normal_.default") -> check of its bound arguments.
ARGUMENT_CHECKS: dict[str, Check] = {}


def check(*names: str) -> Callable[[Check], Check]:
    """Register a check for these overloads; ValueError if one has a check already."""

    def register(fn: Check) -> Check:
        for name in names:
            if name in ARGUMENT_CHECKS:
                raise ValueError(f"{name}: a check is already registered")
            ARGUMENT_CHECKS[name] = fn
        return fn

    return register


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """The integers that ``random_`` accepts as bounds for a tensor of ``dtype``."""
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return int(info.min), int(info.max)
    whole = torch.iinfo(dtype)
    return whole.min, whole.max


def _unimplemented(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{kernel}\" not implemented for '{scalar_type(dtype)}'")


@check("aten.uniform_.default", "aten.uniform.default")
def uniform(x: Any, low: float = 0.0, high: float = 1.0, *_: Any) -> None:
    dtype = x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(
            f"\"check_uniform_bounds\" not implemented for '{scalar_type(dtype)}'"
        )
    info = torch.finfo(dtype)
    if not info.min <= low <= info.max:
        raise RuntimeError(f"from is out of bounds for {_cpp(dtype)}")
    if not info.min <= high <= info.max:
        raise RuntimeError(f"to is out of bounds for {_cpp(dtype)}")
    if not low <= high:
        raise RuntimeError(
            f"uniform_ expects to return a [from, to) range, but found from={low:g} > to={high:g}"
        )
    if high - low > info.max:
        raise RuntimeError(
            f"uniform_ expects to-from <= std::numeric_limits<{scalar_type(dtype)}>::max(), but "
            f"found to={high:g} and from={low:g} which result in to-from to exceed the limit"
        )


@check("aten.normal_.default", "aten.normal_functional.default")
def normal(x: Any, mean: float = 0.0, std: float = 1.0, *_: Any) -> None:
    if not std >= 0.0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std:g}")
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise NotImplementedError(
            f"\"normal_kernel_cpu\" not implemented for '{scalar_type(x.dtype)}'"
        )


@check("aten.normal.Tensor_float", "aten.normal.float_float")
def normal_std(mean: Any, std: float = 1.0, *_: Any) -> None:
    if not std >= 0.0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std:g}")


@check("aten.normal.Tensor_Tensor", "aten.normal.float_Tensor")
def normal_complex_std(mean: Any, std: Any, *_: Any) -> None:
    if std.dtype.is_complex:
        raise RuntimeError("normal expects standard deviation to be non-complex")


@check("aten.exponential_.default", "aten.exponential.default")
def exponential(x: Any, lambd: float = 1.0, *_: Any) -> None:
    if not lambd > 0.0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd:g}")
    if not x.dtype.is_floating_point:
        raise RuntimeError(
            "Exponential distribution is a continuous probability distribution. "
            f"dtype must be a floating point but you specified {scalar_type(x.dtype)}"
        )


@check("aten.geometric_.default", "aten.geometric.default")
def geometric(x: Any, p: float, *_: Any) -> None:
    if not 0.0 < p < 1.0:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p:g}")


@check("aten.cauchy_.default", "aten.cauchy.default")
def cauchy(x: Any, median: float = 0.0, sigma: float = 1.0, *_: Any) -> None:
    if not sigma > 0.0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma:g}")
    if not x.dtype.is_floating_point:
        raise RuntimeError(
            "Cauchy distribution is a continuous probability distribution. "
            f"dtype must be a floating point but you specified {_cpp(x.dtype)}"
        )


@check("aten.log_normal_.default", "aten.log_normal.default")
def log_normal(x: Any, mean: float = 1.0, std: float = 2.0, *_: Any) -> None:
    if not std > 0.0:
        raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std:g}")
    if not x.dtype.is_floating_point:
        raise NotImplementedError(
            f"\"log_normal_cpu\" not implemented for '{scalar_type(x.dtype)}'"
        )


@check("aten.random_.from", "aten.random.from")
def random_from(x: Any, low: int, high: int | None, *_: Any) -> None:
    smallest, largest = _limits(x.dtype)
    if high is not None and not low < high:
        raise RuntimeError(
            f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}"
        )
    if not smallest <= low <= largest:
        raise RuntimeError(f"from is out of bounds for {_cpp(x.dtype)}")
    if high is not None and not smallest <= high - 1 <= largest:
        raise RuntimeError(f"to - 1 is out of bounds for {_cpp(x.dtype)}")


def _cpp(dtype: torch.dtype) -> str:
    names = {
        torch.uint8: "unsigned char",
        torch.int8: "signed char",
        torch.int16: "short",
        torch.int32: "int",
        torch.int64: "long",
        torch.float16: "c10::Half",
        torch.bfloat16: "c10::BFloat16",
        torch.float32: "float",
        torch.float64: "double",
    }
    return names.get(dtype, str(dtype).removeprefix("torch."))


@check("aten.random_.to", "aten.random.to")
def random_to(x: Any, high: int, *_: Any) -> None:
    random_from(x, 0, high)


@check("aten.bernoulli_.float", "aten.bernoulli.p")
def bernoulli(x: Any, p: float = 0.5, *_: Any) -> None:
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p:g}")


@check("aten.bernoulli.default")
def bernoulli_probabilities(p: Any, *_: Any) -> None:
    if not p.dtype.is_floating_point:
        raise _unimplemented("bernoulli_tensor_cpu_p_", p.dtype)


@check("aten.bernoulli_.Tensor", "aten.bernoulli.Tensor")
def bernoulli_tensor(x: Any, p: Any, *_: Any) -> None:
    bernoulli_probabilities(p)
    lead = len(x.shape) - len(p.shape)
    for d, size in enumerate(p.shape):
        wanted = x.shape[lead + d] if lead + d >= 0 else None
        if size not in (1, wanted):
            raise RuntimeError(
                f"The expanded size of the tensor ({wanted}) must match the existing size ({size}) "
                f"at non-singleton dimension {lead + d}.  Target sizes: {list(x.shape)}.  "
                f"Tensor sizes: {list(p.shape)}"
            )


@check("aten.multinomial.default")
def multinomial(weights: Any, samples: int, replacement: bool = False, *_: Any) -> None:
    if not 0 < len(weights.shape) <= 2:
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not weights.dtype.is_floating_point:
        name = scalar_type(weights.dtype)
        raise RuntimeError(
            f"multinomial only supports floating-point dtypes for input, got: {name}"
        )
    if samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and samples > weights.shape[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )
    if weights.shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")


@check("aten.randperm.default", "aten.randperm.generator")
def randperm(n: int, *values: Any) -> None:
    if n < 0:
        raise RuntimeError(f"Trying to create tensor with negative dimension {n}: [{n}]")
    dtype = next((v for v in values if isinstance(v, torch.dtype)), torch.int64)
    if dtype.is_floating_point:
        largest = (1 << (1 - int(math.log2(torch.finfo(dtype).eps)))) + 1
        if n > largest:
            raise RuntimeError(f"n cannot be greater than {largest} for {scalar_type(dtype)} type.")
    elif n > torch.iinfo(dtype).max:
        name = str(dtype).removeprefix("torch.")
        raise RuntimeError(f"value cannot be converted to type {name}_t without overflow")


@check("aten.native_dropout.default")
def dropout(x: Any, p: float, train: bool | None = None) -> None:
    if train is not False and not 0.0 <= p <= 1.0:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={1.0 - p:g}")
