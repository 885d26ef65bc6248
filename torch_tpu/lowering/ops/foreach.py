"""Every functional ``_foreach_*`` overload as one program: the per-element ATen op on each entry.

The element op and the order of its arguments come from the two schemas; in-place forms derive from
the functional ones as for any other op. Only the few exceptions are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder, emit_op, unbind_arguments
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value
from torch_tpu.lowering.variants import written_arguments

_PREFIX = "aten::_foreach_"

# Element ops whose name is not the foreach op's name without its prefix.
_ELEMENT = {"norm": "linalg_vector_norm", "powsum": "linalg__powsum"}

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

    None when a kind does not fit or a required argument is left over. A number may stand where
    the element op takes a tensor, and an entry of a tensor of scalars for a number.
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
        if have.removeprefix("Optional[").rstrip("]") != wanted and {have, wanted} != {
            "Tensor",
            "number",
        }:
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
    packet = getattr(torch.ops.aten, _ELEMENT.get(op, op))
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


def _entry(b: OpBuilder, kind: str, value: Any, i: int) -> Any:
    """What the i-th element op receives: its entry of a list or of a 1-d tensor of scalars."""
    if kind in _ENTRY:
        return value[i]
    if kind == "Tensor" and value.rank == 1:
        return b.index_dim(value, 0, i)
    return value


def _register(foreach: Any) -> None:
    element, where = element_of(foreach)
    schema = foreach._schema.arguments
    kinds = [str(a.type) for a in schema]
    defaults = [
        a.default_value if a.has_default_value() else None for a in element._schema.arguments
    ]

    def run(b: OpBuilder, *args: Any, alpha: Any = 1, dtype: torch.dtype | None = None) -> Any:
        named = {"alpha": alpha, "dtype": dtype}
        rest = iter(args)
        values = [named.get(a.name) if a.kwarg_only else next(rest, None) for a in schema]
        return _emit_entries(b, values)

    def _emit_entries(b: OpBuilder, values: Sequence[Any]) -> list[Value]:
        outs = []
        for i, spec in enumerate(b.results):
            bound = list(defaults)
            for at, kind, value in zip(where, kinds, values, strict=True):
                bound[at] = _entry(b, kind, value, i)
            positional, keywords = unbind_arguments(element, bound)
            outs.append(emit_op(b, element, positional, keywords, [spec]))
        return outs

    name = (
        foreach._schema.name.replace("::", ".") + "." + (foreach._schema.overload_name or "default")
    )
    static = _STATIC.get(foreach._schema.name.removeprefix(_PREFIX) + "." + foreach._overloadname)
    lower(name, static=() if static is None else (static,))(run)


for _foreach in foreach_overloads():
    _register(_foreach)
