"""The table of lowerings: one function an op, with declared facts about its arguments.

``@lower("aten.softplus", promote="result", broadcast=True)`` registers a function
``fn(b, *args)`` that receives the builder and the schema's arguments in order: tensors as
:class:`Value`, lists of tensors as lists of Values, everything else as Python objects. A ``Scalar``
argument is an operand (a weak 0-d Value) unless it is declared static or equals its schema default.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Promote = Literal["result", "operands", "none"]


@dataclass(frozen=True)
class Lowering:
    """One registered lowering.

    promote    "result": cast tensor and Scalar arguments to the dtype of the first result;
               "operands": cast them to their common type (comparisons); "none": leave them alone.
               Half precision is widened to float32 inside ("opmath") and rounded once at the end.
    broadcast  expand all tensor arguments to the shape of the first result
    keep       argument names that promotion and broadcasting of dtype leave alone (masks, indices)
    static     argument names whose Scalar stays in the program key (shapes depend on it)
    operand    argument names of type float or int that travel as operands all the same
    lift_0d    present 0-d tensors as shape (1,), restore the result's shape afterwards
    opmath     compute in float32 for half precision (only with promote)
    mutates    arguments that the op writes although its schema does not say so; their new values
               follow the results
    specs      for ops without a meta kernel: the results' (shape, dtype) from the bound arguments,
               None for a result that is undefined
    """

    name: str
    fn: Callable[..., Any]
    promote: Promote = "none"
    broadcast: bool = False
    keep: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()
    operand: frozenset[str] = frozenset()
    lift_0d: bool = False
    opmath: bool = True
    mutates: tuple[str, ...] = ()
    specs: Callable[..., Sequence[tuple[tuple[int, ...], torch.dtype] | None]] | None = None
    parameters: frozenset[str] = field(default=frozenset())


_LOWERINGS: dict[str, Lowering] = {}


def lower(
    *names: str,
    promote: Promote = "none",
    broadcast: bool = False,
    keep: Iterable[str] = (),
    static: Iterable[str] = (),
    operand: Iterable[str] = (),
    lift_0d: bool = False,
    opmath: bool = True,
    mutates: Iterable[str] = (),
    specs: Callable[..., Sequence[tuple[tuple[int, ...], torch.dtype] | None]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a lowering under ``namespace.op`` (all overloads) or ``namespace.op.overload``.

    Raises ValueError when a name is registered twice or names no ATen op.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        parameters = frozenset(inspect.signature(fn).parameters)
        for name in names:
            if name in _LOWERINGS:
                raise ValueError(f"{name}: a lowering is already registered")
            resolve(name)
            _LOWERINGS[name] = Lowering(
                name,
                fn,
                promote,
                broadcast,
                frozenset(keep),
                frozenset(static),
                frozenset(operand),
                lift_0d,
                opmath,
                tuple(mutates),
                specs,
                parameters,
            )
        return fn

    return register


def pointwise(*names: str, promote: Promote = "result", **facts: Any) -> Callable[..., Any]:
    """:func:`lower` for elementwise ops: promoted and broadcast."""
    return lower(*names, promote=promote, broadcast=True, **facts)


def resolve(name: str) -> list[Any]:
    """The OpOverloads that ``namespace.op[.overload]`` stands for; ValueError if there are none."""
    parts = name.split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    if packet is None or len(parts) not in (2, 3):
        raise ValueError(f"{name}: no such op")
    if len(parts) == 3:
        overload = getattr(packet, parts[2], None)
        if overload is None:
            raise ValueError(f"{name}: no such overload")
        return [overload]
    return [getattr(packet, o) for o in packet.overloads()]


def overload_name(overload: Any) -> str:
    return str(overload.name()).replace("::", ".") + (
        ".default" if "." not in overload.name() else ""
    )


def find(overload: Any) -> Lowering | None:
    """The lowering of an OpOverload, looked up by overload first, then by op.

    A name without overload does not cover ``out=`` forms: those derive from the functional one.
    """
    name = overload_name(overload)
    hit = _LOWERINGS.get(name)
    if hit is None and not any(a.is_out for a in overload._schema.arguments):
        hit = _LOWERINGS.get(name.rsplit(".", 1)[0])
    return hit


def all_lowerings() -> dict[str, Lowering]:
    return dict(_LOWERINGS)


def load_all() -> None:
    """Import every module of ``lowering.ops`` so that its registrations run."""
    from torch_tpu.lowering import ops

    for module in sorted(m.name for m in pkgutil.iter_modules(ops.__path__)):
        importlib.import_module(f"{ops.__name__}.{module}")
