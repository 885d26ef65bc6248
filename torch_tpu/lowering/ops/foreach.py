"""Every functional ``_foreach_*`` overload as one program: the per-element ATen op on each entry.

The element op and the order of its arguments come from the two schemas; in-place forms derive from
the functional ones as for any other op. Only the few exceptions are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder, Spec, emit_op, expected_specs, unbind_arguments
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value
from torch_tpu.lowering.variants import written_arguments

_PREFIX = "aten::_foreach_"

# Element ops whose name is not the foreach op's name without its prefix.
_ELEMENT = {
    "norm.Scalar": "linalg_vector_norm",
    "powsum.Scalar": "linalg__powsum",
    "maximum.Scalar": "clamp_min",
    "maximum.ScalarList": "clamp_min",
    "minimum.Scalar": "clamp_max",
    "minimum.ScalarList": "clamp_max",
}

# What the element ops declare static: x ** 2 is a product, a 2-norm a root of a sum of squares.
_STATIC = {
    "pow.Scalar": "exponent",
    "pow.ScalarList": "exponent",
    "norm.Scalar": "ord",
    "powsum.Scalar": "ord",
}

_ENTRY = {"List[Tensor]": "Tensor", "List[number]": "number"}


def foreach_overloads() -> list[Any]:
    """All functional foreach overloads that return tensors."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith(_PREFIX):
            op, _, overload = name.removeprefix("aten::").partition(".")
            candidate = getattr(getattr(torch.ops.aten, op), overload or "default")
            if candidate._schema.returns and not written_arguments(candidate):
                found.append(candidate)
    return found


def _positions(foreach: Any, element: Any) -> list[int] | None:
    """Where each foreach argument goes in the element schema: by name, else by position.

    None when a kind does not fit or a required argument is left over. An entry of a tensor of
    scalars may stand for a number.
    """
    schema = element._schema.arguments
    names = [a.name for a in schema]
    where = []
    for i, argument in enumerate(foreach._schema.arguments):
        at = names.index(argument.name) if argument.name in names else i
        if at >= len(schema):
            return None
        have = _ENTRY.get(str(argument.type), str(argument.type))
        wanted = str(schema[at].type).removeprefix("Optional[").rstrip("]")
        have = have.removeprefix("Optional[").rstrip("]")
        if have != wanted and (have, wanted) != ("Tensor", "number"):
            return None
        where.append(at)
    missing = (i for i, a in enumerate(schema) if i not in where and not a.has_default_value())
    return where if next(missing, None) is None else None


def element_of(foreach: Any) -> tuple[Any, list[int]]:
    """The ATen overload a foreach overload applies to each entry, and where its arguments go.

    Of the overloads that fit, the one with the most arguments of exactly the given kind.
    Raises ValueError when none fits.
    """
    op = foreach._schema.name.removeprefix(_PREFIX)
    packet = getattr(torch.ops.aten, _ELEMENT.get(f"{op}.{foreach._overloadname}", op))
    kinds = [_ENTRY.get(str(a.type), str(a.type)) for a in foreach._schema.arguments]
    fitting = []
    for candidate in (getattr(packet, o) for o in packet.overloads()):
        if written_arguments(candidate) or len(candidate._schema.returns) != 1:
            continue
        where = _positions(foreach, candidate)
        if where is not None:
            types = [str(candidate._schema.arguments[at].type) for at in where]
            exact = sum(have == wanted for have, wanted in zip(kinds, types, strict=True))
            fitting.append((exact, candidate, where))
    if not fitting:
        raise ValueError(f"{foreach}: no element op fits its schema")
    _, element, where = max(fitting, key=lambda entry: entry[0])
    return element, where


def _entry(kind: str, value: Any, i: int, scalar: Callable[[Value, int], Value]) -> Any:
    """What the i-th element op receives: its entry of a list or of a 1-d tensor of scalars."""
    if kind in _ENTRY:
        return value[i]
    if kind == "Tensor" and value.rank == 1:
        return scalar(value, i)
    return value


def _count(kinds: Sequence[str], values: Sequence[Any]) -> int:
    """How many entries the lists have; RuntimeError in PyTorch's words unless all agree."""
    tensors = [len(v) for kind, v in zip(kinds, values, strict=True) if kind == "List[Tensor]"]
    if tensors[0] == 0:
        raise RuntimeError("Tensor list must have at least one tensor.")
    for other in tensors[1:]:
        if other != tensors[0]:
            raise RuntimeError(
                f"Tensor lists must have the same number of tensors, got {tensors[0]} and {other}"
            )
    for kind, value in zip(kinds, values, strict=True):
        if kind == "List[number]":
            scalars = len(value)
        elif kind == "Tensor" and value.rank == 1:
            scalars = value.shape[0]
        else:
            continue
        if scalars != tensors[0]:
            raise RuntimeError(
                "Tensor list must have same number of elements as scalar list, "
                f"got {tensors[0]} and {scalars}"
            )
    return tensors[0]


def _signature(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What the element op's result types depend on."""
    return tuple(
        (a.shape, a.dtype, a.weak) if isinstance(a, Value) else (type(a), a) for a in arguments
    )


def _register(foreach: Any) -> None:
    element, where = element_of(foreach)
    schema = foreach._schema.arguments
    kinds = [str(a.type) for a in schema]
    defaults = [
        a.default_value if a.has_default_value() else None for a in element._schema.arguments
    ]

    def bind_entry(
        values: Sequence[Any], i: int, scalar: Callable[[Value, int], Value]
    ) -> list[Any]:
        bound = list(defaults)
        for at, kind, value in zip(where, kinds, values, strict=True):
            bound[at] = _entry(kind, value, i, scalar)
        return bound

    def specs(*values: Any) -> list[Spec]:
        """Long lists repeat few shapes, so the element op is asked once for each."""
        known: dict[tuple[Any, ...], list[Spec]] = {}
        out = []
        for i in range(_count(kinds, values)):
            bound = bind_entry(values, i, lambda v, _: Value(v.name, (), v.dtype, weak=True))
            key = _signature(bound)
            if key not in known:
                known[key] = expected_specs(element, bound)
            out += known[key]
        return out

    def run(b: OpBuilder, *args: Any, alpha: Any = 1, dtype: torch.dtype | None = None) -> Any:
        named = {"alpha": alpha, "dtype": dtype}
        rest = iter(args)
        values = [named.get(a.name) if a.kwarg_only else next(rest, None) for a in schema]
        outs = []
        for i, spec in enumerate(b.results):
            bound = bind_entry(values, i, lambda v, k: b.index_dim(v, 0, k))
            positional, keywords = unbind_arguments(element, bound)
            outs.append(emit_op(b, element, positional, keywords, [spec]))
        return outs

    op = foreach._schema.name.removeprefix(_PREFIX)
    static = _STATIC.get(f"{op}.{foreach._overloadname}")
    lower(
        f"aten._foreach_{op}.{foreach._overloadname}",
        static=() if static is None else (static,),
        specs=specs,
    )(run)


for _foreach in foreach_overloads():
    _register(_foreach)
