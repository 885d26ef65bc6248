"""PyTorch's own decompositions as FX graphs of ATen calls, traced on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch._refs
from torch._decomp import global_decomposition_table
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torch_tpu.lowering.types import Value

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_EXPLICIT_NON_FUNCTIONAL = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd


# How this package expresses ops through others, by name ("aten.cholesky.default"), where PyTorch
# offers nothing that can be traced.
COMPOSITIONS: dict[str, Callable[..., Any]] = {}


@cache
def decomposition_of(overload: Any) -> Callable[..., Any] | None:
    """How this op is expressed through others; None if it is not."""
    composition = COMPOSITIONS.get(str(overload))
    if composition is not None:
        return composition
    table = global_decomposition_table["post_autograd"]
    if overload in table:
        return table[overload]
    body = _python_body(overload)
    if body is not None:
        return body
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), _IMPLICIT):
        return lambda *a, **k: overload._op_dk(_IMPLICIT, *a, **k)
    if _IMPLICIT in overload.py_kernels:
        return overload.py_kernels[_IMPLICIT]
    for key in (_EXPLICIT, _EXPLICIT_NON_FUNCTIONAL):
        if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
            return lambda *a, _key=key, **k: overload._op_dk(_key, *a, **k)
    return None


def _python_body(overload: Any) -> Callable[..., Any] | None:
    """The function behind a ``torch.library.custom_op`` of PyTorch itself.

    A user's is not looked into: it may depend on more than its arguments.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(overload._schema.name)
    if definition is None or not definition._init_fn.__module__.startswith("torch."):
        return None
    return definition._init_fn


def has_decomposition(overload: Any) -> bool:
    return decomposition_of(overload) is not None


def trace_decomposition(
    overload: Any, values: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Value]]:
    """Trace the decomposition of ``overload`` for these bound arguments.

    Returns the graph (functional, ATen level) and the values its placeholders stand for.
    Raises NotImplementedError when PyTorch has no decomposition.
    """
    decomposition = decomposition_of(overload)
    if decomposition is None:
        raise NotImplementedError(f"{overload}: no lowering and no decomposition")
    schema = overload._schema.arguments
    leaves, spec = pytree.tree_flatten(_plain(list(values)), is_leaf=lambda x: isinstance(x, Value))
    where = [i for i, x in enumerate(leaves) if isinstance(x, Value)]
    inputs = [leaves[i] for i in where]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            filled[i] = t
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument, value in zip(schema, pytree.tree_unflatten(filled, spec), strict=True):
            if argument.name == "generator":
                continue
            if argument.kwarg_only:
                if argument.name == "device" and value is not None:
                    value = torch.device("cpu")
                kwargs[argument.name] = value
            else:
                args.append(value)
        try:
            return decomposition(*args, **kwargs)
        except TypeError:
            trimmed = {k: v for k, v in kwargs.items() if v is not None}
            return decomposition(*args, **trimmed)

    with _data_independent(overload), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = []
        for value in inputs:
            fakes.append(torch.empty(value.shape, dtype=value.dtype))
        module = _trace(run, fakes)
        if any(_mutates(node) for node in module.graph.nodes):
            module = _trace(torch.func.functionalize(run, remove="mutations"), fakes)
        if any(_mutates(node) for node in module.graph.nodes):
            # functorch does not see through composite kernels written in C++; this mode does.
            module = _trace(dispatch_functionalize(run), fakes)
    if any(_mutates(node) for node in module.graph.nodes):
        raise NotImplementedError(f"{overload}: its decomposition writes to its arguments")
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is overload:
            raise NotImplementedError(f"{overload}: its decomposition calls itself")
    return module, inputs


def _plain(value: Any) -> Any:
    """FX's immutable lists as lists, which decompositions may write to."""
    return [_plain(v) for v in value] if isinstance(value, list) else value


@contextmanager
def _data_independent(overload: Any) -> Iterator[None]:
    """A decomposition that looks at values cannot become part of a program."""
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise NotImplementedError(f"{overload}: its decomposition reads values ({error})") from None


def _trace(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    return make_fx(fn, decomposition_table={}, _allow_non_fake_inputs=True)(*inputs)


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
