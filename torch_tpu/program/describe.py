"""A call or graph input in words: the parts its program was made for, each with a label.

A description names exactly what the native core puts into a program's key (csrc/dispatch/call.cpp),
so that two descriptions of one op differ where their keys do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.lowering import views
from torch_tpu.program import options
from torch_tpu.program.plan import ScalarArg, StorageSpec, TensorArg

# Label of a part → its value: shape tuples, dtypes, words, static values.
Description = dict[str, Any]


class Operand(str):
    """Stands for a number whose value is not part of the program."""


def _layout(arg: TensorArg, storages: Sequence[StorageSpec]) -> str:
    """How the tensor lies in its storage, as far as the program depends on it."""
    if arg.view in (views.WHOLE, views.EMPTY):
        return "all of its storage" if arg.view == views.WHOLE else "empty"
    spec = storages[arg.storage]
    base = f"a storage of shape {spec.dims}"
    if spec.dtype is not arg.dtype:
        base += f" and {spec.dtype}"
    if arg.view == views.RESHAPE:
        return f"all of {base}, reshaped"
    return f"strides {arg.strides} over {base}"


def _kind(arg: Any) -> str:
    if isinstance(arg, TensorArg):
        if arg.view != views.SCALAR:
            return "tensor"
        return "Python number" if arg.wrapped else "0-d CPU tensor"
    return "None" if arg is None else "value"


def _operand(arg: Any) -> Any:
    return Operand(f"any Python {arg.kind}") if isinstance(arg, ScalarArg) else arg


def describe(
    names: Sequence[str], args: Sequence[Any], storages: Sequence[StorageSpec]
) -> Description:
    """The parts of a program's key.

    Args:
        names: of the arguments, for the labels.
        args: as the native core describes them (see :mod:`torch_tpu.program.plan`): TensorArg,
            ScalarArg, lists of them, or static values.
        storages: what the tensors stand on.
    """
    parts: Description = {}
    sharing: dict[int, list[str]] = {}
    for position, (name, arg) in enumerate(zip(names, args, strict=True), 1):
        where = f"argument {position} ({name})"
        leaves = arg if isinstance(arg, list) else [arg]
        tensors = [a for a in leaves if isinstance(a, TensorArg)]
        if not tensors:
            if not isinstance(arg, (torch.device, torch.layout)):
                values = [_operand(a) for a in leaves]
                parts[f"argument `{name}`"] = values if isinstance(arg, list) else values[0]
            continue
        many = isinstance(arg, list)

        def put(label: str, values: list[Any], many: bool = many, where: str = where) -> None:
            parts[f"{label}{'s' if many else ''} of {where}"] = tuple(values) if many else values[0]

        put("kind", [_kind(a) for a in leaves])
        put("shape", [a.sizes for a in tensors])
        put("dtype", [a.dtype for a in tensors])
        on_device = [a for a in tensors if a.view != views.SCALAR]
        if on_device:
            put("layout", [_layout(a, storages) for a in on_device])
        for a in on_device:
            sharing.setdefault(a.storage, []).append(name)
    shared = tuple(tuple(users) for users in sharing.values() if len(users) > 1)
    if shared:
        parts["arguments that share a storage"] = shared
    parts["float32 matmul precision"] = options.matmul_precision()
    parts["index checks"] = options.index_checks()
    parts["excess precision"] = _C.allow_excess_precision()
    return parts
