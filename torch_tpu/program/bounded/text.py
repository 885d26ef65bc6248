"""The StableHLO text that :class:`~torch_tpu.lowering.builder.Builder` writes, taken apart again.

One line is one operation, regions included. Lines of the same operation from programs for several
sizes differ in numbers only: those of types and of attributes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from torch_tpu.lowering.types import MLIR_DTYPE

DTYPE_OF = {text: dtype for dtype, text in MLIR_DTYPE.items()}

_TYPE = re.compile(r"tensor<((?:\d+x)*)(complex<[^>]*>|[a-zA-Z]\w*)>")
_NUMBER = re.compile(r"(?<![%\w.#@])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_OPERAND = re.compile(r"%[A-Za-z0-9_]+(?:#\d+)?")

Type = tuple[tuple[int, ...], torch.dtype]


class Unreadable(Exception):
    """Text that this reader does not know."""


@dataclass
class Line:
    """``results = kind(operands)``; ``attributes`` is the text between operands and types."""

    name: str  # of the result, without "%"; several results are name#0, name#1, …
    count: int
    kind: str
    operands: list[str]
    attributes: str
    regions: list[str]
    types: list[Type]  # of the results
    location: str = ""
    numbers: list[float] = field(default_factory=list)  # in the attributes, in order
    template: str = ""  # the attributes with their numbers taken out


@dataclass
class Function:
    parameters: list[tuple[str, Type, int]]  # name, type, the result it may be written over or -1
    lines: list[Line]
    results: list[str]


def types_in(text: str) -> list[Type]:
    out = []
    for dims, element in _TYPE.findall(text):
        if element not in DTYPE_OF:
            raise Unreadable(f"element type {element}")
        out.append((tuple(int(d) for d in dims.split("x")[:-1]), DTYPE_OF[element]))
    return out


def read_function(text: str) -> Function:
    """The one function of a module."""
    head, _, rest = text.partition("func.func public @main(")
    signature, _, body = rest.partition(" {\n")
    if not body or "attributes" in head:
        raise Unreadable("no plain main function")
    body, _, tail = body.rpartition("\n    return ")
    results = _OPERAND.findall(tail.partition(" : ")[0])
    parameters = []
    listed, _, _ = signature.partition(") -> (")
    for item in re.split(r", (?=%)", listed) if listed else []:
        name, _, kind = item.partition(": ")
        alias = re.search(r"tf\.aliasing_output = (\d+)", kind)
        parameters.append((name, types_in(kind)[0], int(alias.group(1)) if alias else -1))
    return Function(parameters, [read_line(line) for line in _whole_lines(body)], results)


def _whole_lines(body: str) -> list[str]:
    """Operations with their regions; a region ends where its braces do."""
    lines, open_braces, current = [], 0, ""
    for row in body.split("\n"):
        current = f"{current}\n{row}" if current else row
        open_braces += row.count("{") - row.count("}")
        if open_braces == 0:
            lines.append(current.strip())
            current = ""
    if current:
        raise Unreadable("braces that do not close")
    return lines


def read_line(text: str) -> Line:
    location = ""
    if text.endswith(")") and " loc(" in text:
        text, _, location = text.rpartition(" loc(")
        location = location[:-1]
    left, found, right = text.partition(" = ")
    if not found or not left.startswith("%"):
        raise Unreadable(text[:80])
    name, _, count = left[1:].partition(":")
    regions: list[str] = []
    if right.startswith('"'):
        kind, _, rest = right[1:].partition('"(')
        inner, _, rest = rest.partition(")")
        operands = _OPERAND.findall(inner)
        rest, regions = _cut_regions(rest)
        attributes, _, types = rest.rpartition(" : ")
    else:
        kind = re.match(r"[a-z_.]+", right).group()  # type: ignore[union-attr]
        attributes, _, types = right[len(kind) :].rpartition(" : ")
        operands = _OPERAND.findall(attributes)
    _, arrow, results = types.rpartition("-> ")
    found_types = types_in(results if arrow else types)
    if kind == "stablehlo.select":
        found_types = found_types[-1:]
    n = int(count) if count else 1
    if len(found_types) != n:
        found_types = found_types[:1] * n
    line = Line(name, n, kind, operands, attributes, regions, found_types, location)
    line.numbers = [float(x) if _is_float(x) else int(x) for x in _NUMBER.findall(attributes)]
    line.template = _NUMBER.sub("?", attributes)
    return line


def _is_float(text: str) -> bool:
    return "." in text or "e" in text.lower()


def _cut_regions(text: str) -> tuple[str, list[str]]:
    """Takes ``({ … }, { … })`` out of an operation's text."""
    start = text.find("({\n")
    if start < 0:
        return text, []
    regions, depth, begin, at = [], 0, start + 1, start + 1
    while True:
        c = text[at]
        if c == "{":
            if depth == 0:
                begin = at
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                regions.append(text[begin : at + 1])
        elif c == ")" and depth == 0:
            return text[:start] + text[at + 1 :], regions
        at += 1


def integers(attributes: str, name: str) -> list[int]:
    """The integers of an attribute ``name = [1, 2]``, ``array<i64: 1, 2>`` or a plain number."""
    found = re.search(
        rf"\b{name} = (?:\[([-\d, ]*)\]|array<i64(?:: ([-\d, ]*))?>|(-?\d+))", attributes
    )
    if found is None:
        return []
    inner = found.group(1) or found.group(2) or found.group(3) or ""
    return [int(x) for x in inner.split(",") if x.strip()]


def pairs(attributes: str, name: str) -> list[tuple[int, int]]:
    """The rows of ``name = dense<[[0, 1], [2, 3]]>``."""
    found = re.search(rf"\b{name} = dense<\[(.*?)\]> :", attributes)
    if found is None:
        return []
    flat = [int(x) for x in re.findall(r"-?\d+", found.group(1))]
    return list(zip(flat[::2], flat[1::2], strict=True))
