"""PyTorch's own rule for the shapes, dtypes and strides of a call's results, and for its errors.

Most ops have a *structured* kernel: a shape function in C++, which the CPU's kernel runs too, and a
computation into given results. PyTorch registers Python references over those shape functions for
meta tensors. They differ from the CPU in words and in corners, take ten times as long, and the
first of them imports TorchDynamo, which takes seconds. So structured ops are asked directly: their
default kernel, which makes the results and then calls the out= form, with that call left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_tpu.lowering.types import opmath_dtype

aten = torch.ops.aten

_DEFAULT_KERNEL = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional


class _NoComputation(TorchDispatchMode):
    """out= calls return their outputs as they are; everything else runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default wraps the method below, and that imports TorchDynamo

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = _out_names(func)
        if not names:
            return func(*args, **kwargs)
        outs = tuple(kwargs[name] for name in names)
        return outs[0] if len(outs) == 1 else outs


@cache
def _out_names(overload: Any) -> tuple[str, ...]:
    return tuple(a.name for a in overload._schema.arguments if a.is_out)


@cache
def is_structured(overload: Any) -> bool:
    """Whether the op has one shape function for all devices."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), "CompositeExplicitAutogradNonFunctional"
    )


def _without_computation(overload: Any, *args: Any, **kwargs: Any) -> Any:
    with _NoComputation():
        return overload._op_dk(_DEFAULT_KERNEL, *args, **kwargs)


@cache
def _tensor_form(overload: Any) -> Any:
    """The structured ``op.Tensor`` that ``op.Scalar`` computes with a wrapped number, or None."""
    form = getattr(overload.overloadpacket, "Tensor", None)
    if overload._overloadname != "Scalar" or form is None or not is_structured(form):
        return None
    names = [[a.name for a in o._schema.arguments] for o in (overload, form)]
    return form if names[0] == names[1] and names[0][:2] == ["self", "other"] else None


def _wrapped(number: Any) -> torch.Tensor:
    from torch_tpu import _C

    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    tensor = torch.tensor(number, dtype=kinds[type(number)])
    _C.set_wrapped_number(tensor)
    return tensor


# Common ops whose kernels are not structured. A rule gives None where it has nothing to say, and
# PyTorch's reference is asked.
_Rule = Callable[..., Any]


def _pointwise(dtype: torch.dtype, *operands: torch.Tensor) -> torch.Tensor | None:
    """A result of this dtype with the shape and strides that TensorIterator gives it."""
    if not all(isinstance(t, torch.Tensor) for t in operands):
        return None
    plain = [torch.empty_strided(t.size(), t.stride(), device="meta") for t in operands]
    ops = {1: aten.neg.default, 2: aten.mul.Tensor, 3: aten.addcmul.default}
    result = _without_computation(ops[len(plain)], *plain)
    return torch.empty_strided(result.size(), result.stride(), dtype=dtype, device="meta")


def _float_unary(x: torch.Tensor, *_: Any) -> torch.Tensor | None:
    return _pointwise(x.dtype, x) if x.is_floating_point() else None


def _logical(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    return _pointwise(torch.bool, x, y)


def _where(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    if condition.dtype is not torch.bool:
        return None
    return _pointwise(torch.result_type(x, y), condition, x, y)


def _like(x: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor | None:
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    return _pointwise(kwargs.get("dtype") or x.dtype, x)


def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _without_computation(aten.mean.dim, x, None, dtype=dtype)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if dtype is not None or not x.is_floating_point():
        return None
    return _without_computation(aten._softmax.default, x, dim, False)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor | None:
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if not x.dim() or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or len(dtypes) > 1:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...] | None:
    axis = x.dim() - len(shape)
    parameters = [p for p in (weight, bias) if p is not None]
    usual = x.is_floating_point() and axis >= 0 and tuple(x.shape[axis:]) == tuple(shape)
    if not usual or not shape or any(tuple(p.shape) != tuple(shape) for p in parameters):
        return None
    statistics = (*x.shape[:axis], *[1] * len(shape))
    shapes = ((x.shape, x.dtype), *[(statistics, opmath_dtype(x.dtype))] * 2)
    return tuple(torch.empty(s, dtype=dtype, device="meta") for s, dtype in shapes)


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...] | None:
    if x.dim() < 2 or not x.is_floating_point() or (not training and (mean is None or var is None)):
        return None
    channels = (x.shape[1],)
    layout = torch._prims_common.suggest_memory_format(x)
    given = [p for p in (weight, bias, mean, var) if p is not None]
    if any(p.shape != channels for p in given) or not x.is_contiguous(memory_format=layout):
        return None
    out = torch.empty_like(x, memory_format=layout)
    stats = [torch.empty(channels, dtype=opmath_dtype(x.dtype), device="meta") for _ in range(2)]
    return (out, *stats)


_RULES: dict[Any, _Rule] = {
    aten.relu.default: _float_unary,
    aten.hardtanh.default: _float_unary,
    aten.where.self: _where,
    aten.ones_like.default: _like,
    aten.zeros_like.default: _like,
    aten.full_like.default: _like,
    aten.mean.default: _mean,
    aten._safe_softmax.default: _safe_softmax,
    aten.logical_and.default: _logical,
    aten.logical_or.default: _logical,
    aten.logical_xor.default: _logical,
    aten.linear.default: _linear,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_batch_norm.default: _batch_norm,
}


# In evaluation PyTorch's CPU kernels keep no statistics; graphs are traced with those of other
# devices. Overload → position of the argument that says whether this is training, if one does.
_KEEPS_STATISTICS_IF = {
    aten.native_batch_norm.default: 5,
    aten._native_batch_norm_legit.default: 5,
    aten._native_batch_norm_legit_no_training.default: None,
    aten._batch_norm_no_update.default: None,
}


def empty_on_cpu(overload: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of results that are empty when the CPU runs this call."""
    if overload not in _KEEPS_STATISTICS_IF:
        return ()
    position = _KEEPS_STATISTICS_IF[overload]
    return () if position is not None and args[position] else (1, 2)


def call_on_meta(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The results of an OpOverload on meta tensors, as meta tensors.

    Raises what PyTorch raises for the call, NotImplementedError where it has no rule.
    """
    if is_structured(overload):
        return _without_computation(overload, *args, **kwargs)
    form = _tensor_form(overload)
    if form is not None and isinstance(args[1], (bool, int, float, complex)):
        # The forms differ in what is keyword-only.
        names = [a.name for a in overload._schema.arguments]
        rest = dict(zip(names[2:], args[2:], strict=False))
        return _without_computation(form, args[0], _wrapped(args[1]), **rest, **kwargs)
    rule = _RULES.get(overload)
    result = rule(*args, **kwargs) if rule is not None else None
    return overload(*args, **kwargs) if result is None else result
