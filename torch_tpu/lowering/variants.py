"""In-place and ``out=`` overloads expressed through their functional overload, by schema."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Variant:
    """How a mutating overload is computed: ``functional`` with ``arguments`` (indices into the
    mutating overload's arguments, in the functional schema's order), whose results go to
    ``targets`` (argument indices that are written)."""

    functional: Any
    arguments: tuple[int, ...]
    targets: tuple[int, ...]


def written_arguments(overload: Any) -> tuple[int, ...]:
    """Indices of arguments that the schema marks as written."""
    return tuple(
        i
        for i, a in enumerate(overload._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def _signature(schema: Any, skip: tuple[int, ...] = ()) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for i, a in enumerate(schema.arguments) if i not in skip]


def _packets(namespace: str, name: str) -> list[Any]:
    out = []
    candidates = [name, name.removesuffix("_"), name.removesuffix("_") + "_functional", "_" + name]
    if name.startswith("__i"):  # Python's in-place operators: __ilshift__ of __lshift__
        candidates.append("__" + name.removeprefix("__i"))
    for candidate in candidates:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is not None and packet not in out:
            out.append(packet)
    return out


@cache
def functional_variant(overload: Any) -> Variant | None:
    """The functional form of an in-place or out overload; None if the schema offers none."""
    schema = overload._schema
    written = written_arguments(overload)
    if not written:
        return None
    namespace, name = schema.name.split("::")
    outs = tuple(i for i in written if schema.arguments[i].is_out)
    wanted_inplace = _signature(schema)
    wanted_out = _signature(schema, outs)
    inplace_self = len(outs) == 0
    for packet in _packets(namespace, name):
        for candidate_name in packet.overloads():
            candidate = getattr(packet, candidate_name)
            if candidate is overload or written_arguments(candidate):
                continue
            have = _signature(candidate._schema)
            names = [n for n, _ in have]
            target = wanted_inplace if inplace_self else wanted_out
            if not _compatible(have, target):
                continue
            position = {a.name: i for i, a in enumerate(schema.arguments)}
            arguments = tuple(position.get(n, -1) for n in names)
            tensor_returns = len(candidate._schema.returns)
            targets = written if inplace_self else outs
            if tensor_returns < len(targets):
                continue
            return Variant(candidate, arguments, targets)
    return None


def _compatible(have: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> bool:
    """Same arguments by name and type; a functional form may add dtype/layout/device options."""
    options = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    have_map, wanted_map = dict(have), dict(wanted)
    if any(n not in wanted_map and n not in options for n in have_map):
        return False
    return all(n in have_map and have_map[n] == t for n, t in wanted_map.items())
