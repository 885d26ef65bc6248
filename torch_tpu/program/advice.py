"""What to do about recompiles, waits and fallbacks, from a recording of activity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_tpu.program.activity import LineActivity
from torch_tpu.program.recompiles import ABSENT, Compile
from torch_tpu.program.source_lines import SourceLine

# Fewer are not worth a word.
MIN_PROGRAMS = 3
MIN_WAITS = 10
# Calls of an op per program of it. Where each is used again and again (the layers of a model,
# which share a line), nothing is wrong.
MAX_REUSE = 10
_MAX_SHOWN = 4


@dataclass(frozen=True)
class Advice:
    """One thing to do at one line; ``weight`` is how many programs, waits or fallbacks it saves."""

    line: SourceLine | None
    text: str
    weight: int = 0


def advise(compiles: Sequence[Compile], lines: Sequence[LineActivity]) -> list[Advice]:
    """Advice on the compiles of a recording and its lines, the weightiest first."""
    found = [*_on_recompiles(compiles, lines), *_on_waits(lines), *_on_fallbacks(lines)]
    return sorted(found, key=lambda advice: -advice.weight)


def _on_waits(lines: Sequence[LineActivity]) -> list[Advice]:
    return [
        Advice(
            a.line,
            f"the host waits here {a.waits} times: each .item(), .cpu() or print() of a result "
            "stops the queue. Keep results on the device and read them every so many steps.",
            a.waits,
        )
        for a in lines
        if a.waits >= MIN_WAITS
    ]


def _on_fallbacks(lines: Sequence[LineActivity]) -> list[Advice]:
    found = []
    for a in lines:
        if a.fallbacks:
            ops = sorted(n.removesuffix(" on the CPU") for n in a.ops if n.endswith(" CPU"))
            text = (
                f"{', '.join(ops)} ran on the CPU {a.fallbacks} times, with copies both ways. "
                "Report the op; TORCH_TPU_CPU_FALLBACK=error stops where it is called."
            )
            found.append(Advice(a.line, text, a.fallbacks))
    return found


# ---- recompiles ----

# The causes told apart, by the beginning of the label. In a group of compiles the part with the
# most values counts, and of several the first here, for the others follow from it (the layout of a
# tensor whose shape changes).
_CAUSES = {
    "kind": "a number is passed now as one kind, now as another",
    "argument `": "a static argument takes many values",
    "shape": "shapes change",
    "dtype": "dtypes change",
    "float32": "the matmul precision changes",
    "index checks": "a setting changes",
    "excess": "a setting changes",
    "layout": "tensors lie in memory in many ways",
    "argument": "tensors share a storage now and now not",
}
_REMEDIES = {
    "kind": "Always pass the same kind.",
    "argument `": (
        "A number that changes is better a tensor operand (an index, a mask) than part of the "
        "program; or round it up to a few values."
    ),
    "dtype": "Cast once, before the loop.",
    "float32": "Set it once, at the start.",
    "layout": "Call .contiguous() where the tensor is made.",
}


@dataclass
class _Group:
    """Programs of one op at one line, and what tells them apart."""

    name: str
    programs: int
    label: str
    values: list[Any]

    @property
    def cause(self) -> str:
        return next((c for c in _CAUSES if self.label.startswith(c)), "")

    def dims(self) -> list[int]:
        """The dims that change, if this is about one tensor's shape of one rank."""
        shapes = self.values
        if not all(isinstance(s, tuple) and all(isinstance(n, int) for n in s) for s in shapes):
            return []
        if len({len(s) for s in shapes}) != 1:
            return []
        return [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]

    def example(self) -> str:
        dims = self.dims()
        if len(dims) == 1:
            sizes = dict.fromkeys(shape[dims[0]] for shape in self.values)
            return f"dim {dims[0]} of the {self.label} of {self.name} is {_some(list(sizes))}"
        return f"the {self.label} of {self.name} is {_some(self.values)}"


def _on_recompiles(compiles: Sequence[Compile], lines: Sequence[LineActivity]) -> list[Advice]:
    calls: dict[tuple[SourceLine | None, str], int] = defaultdict(int)
    for a in lines:
        for name, count in a.ops.items():
            calls[a.line, name] += count
    by_op: dict[tuple[SourceLine | None, str], list[Compile]] = defaultdict(list)
    for compiled in compiles:
        by_op[compiled.line, compiled.name].append(compiled)

    by_cause: dict[tuple[Any, str], list[_Group]] = defaultdict(list)
    where: dict[Any, SourceLine | None] = {}
    for (line, name), group in by_op.items():
        if len(group) < MIN_PROGRAMS or calls[line, name] > MAX_REUSE * len(group):
            continue
        label, values = _first_cause(group)
        found = _Group(name, len(group), label, values)
        # A forward line and its backward pass have one cause and one remedy.
        if not label and not group[0].exact:
            continue  # what sets them apart is not known
        place = None if line is None else (line.file, line.line)
        by_cause[place, found.cause].append(found)
        if line is not None and not (place in where and line.backward):
            where[place] = line

    out = []
    for (place, cause), groups in by_cause.items():
        programs = sum(g.programs for g in groups)
        ops = f" of {len(groups)} ops" if len(groups) > 1 else ""
        if not cause:
            text = (
                f"{programs} programs{ops} were made again, because the cache is too small. "
                "Raise TORCH_TPU_MAX_PROGRAMS."
            )
        else:
            # The clearest case: one dim that changes, with many values.
            best = min(groups, key=lambda g: (len(g.dims()) != 1, -len(g.values)))
            remedy = _REMEDIES.get(cause) or _on_shapes(best)
            text = (
                f"{programs} programs{ops} were made because {_CAUSES[cause]}: "
                f"{best.example()}. {remedy}"
            )
        out.append(Advice(where.get(place), text, programs))
    return out


def _on_shapes(group: _Group) -> str:
    if group.cause != "shape":
        return "Set it once, at the start."
    dims = group.dims()
    mark = f"torch._dynamo.mark_dynamic(x, {dims[0]})" if len(dims) == 1 else "mark_dynamic"
    return (
        "Pad to one size or a few, with a mask; or use torch.compile on the function and mark "
        f"the size as dynamic ({mark})."
    )


def _first_cause(group: Sequence[Compile]) -> tuple[str, list[Any]]:
    """The part that tells a group's programs apart, and its values; "" if they are all alike."""
    varying: dict[str, list[Any]] = {}
    for label in dict.fromkeys(label for c in group for label in c.description):
        values: list[Any] = []
        for compiled in group:
            value = compiled.description.get(label, ABSENT)
            if value not in values:
                values.append(value)
        if len(values) > 1:
            varying[label] = values
    order = [
        (-len(values), rank, label)
        for label, values in varying.items()
        for rank, cause in enumerate(_CAUSES)
        if label.startswith(cause)
    ]
    label = min(order)[2] if order else ""
    return label, varying.get(label, [])


def _some(values: Sequence[Any]) -> str:
    texts = [str(v) for v in values]
    if len(texts) > _MAX_SHOWN:
        texts = [*texts[: _MAX_SHOWN - 1], "…", texts[-1]]
    return ", ".join(texts)
