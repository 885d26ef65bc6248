"""The body of one program over storages: reads through views, writes back, text and parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torch_tpu.lowering import views
from torch_tpu.lowering.checks import Label
from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.types import Value, tensor_type
from torch_tpu.program import options as program_options
from torch_tpu.program.plan import Output, Plan, ScalarArg, StorageSpec, TensorArg


class CallEmitter(OpBuilder):
    """An OpBuilder whose values come from the call's storages and operand packs."""

    def __init__(self, storages: Sequence[StorageSpec], n_ints: int, n_floats: int) -> None:
        super().__init__()
        self.location: str | None = None  # MLIR location text of the lines that follow
        self.parameters = [Value(f"%s{i}", s.buffer_dims, s.dtype) for i, s in enumerate(storages)]
        self.bases = [
            p if s.padded is None else self._cut(p, s.dims)
            for p, s in zip(self.parameters, storages, strict=True)
        ]
        self.n_ints = n_ints
        self.n_floats = n_floats
        self._ints: dict[int, Value] = {}
        self._floats: dict[int, Value] = {}
        self.rng_state = (self.int_operand(n_ints), self.int_operand(n_ints + 1))

    def note_bad_index(self, bad: Value) -> None:
        if program_options.index_checks():
            super().note_bad_index(bad)

    def _note(self, failed: Value, label: Label, detail: Value | None = None) -> None:
        if program_options.checks():
            super()._note(failed, label, detail)

    def _cut(self, x: Value, shape: tuple[int, ...]) -> Value:
        """A padded buffer's contents. Written for every size, the full one included, so that
        programs for several sizes differ in numbers only."""
        ranges = ", ".join(f"0:{n}" for n in shape)
        out = tensor_type(shape, x.dtype)
        return self.emit(
            f"stablehlo.slice {x.name} [{ranges}] : ({x.type}) -> {out}", shape, x.dtype
        )

    def line(self, text: str) -> None:
        if self.location is not None and not text.startswith("^"):
            text = f"{text} loc({self.location})"
        super().line(text)

    def int_operand(self, slot: int) -> Value:
        """The i64 scalar at ``slot`` of the ints pack (its length is known only at the end)."""
        if slot not in self._ints:
            one = self.emit(
                f"stablehlo.slice %ints [{slot}:{slot + 1}] : (@INTS@) -> tensor<1xi64>",
                (1,),
                torch.int64,
            )
            self._ints[slot] = self.reshape(one, ())
        return self._ints[slot]

    def float_operand(self, slot: int) -> Value:
        if slot not in self._floats:
            kind = f"tensor<{self.n_floats}xf64>"
            one = self.emit(
                f"stablehlo.slice %floats [{slot}:{slot + 1}] : ({kind}) -> tensor<1xf64>",
                (1,),
                torch.float64,
            )
            self._floats[slot] = self.reshape(one, ())
        return self._floats[slot]

    def number(self, dtype: torch.dtype, slot: int, weak: bool) -> Value:
        """The operand at ``slot`` (of the pack that carries this dtype) as a 0-d value."""
        if dtype.is_complex:
            value = self.complex(self.float_operand(slot), self.float_operand(slot + 1))
        elif dtype.is_floating_point:
            value = self.float_operand(slot)
        else:
            value = self.int_operand(slot)
        value = self.convert(value, dtype)
        return Value(value.name, value.shape, value.dtype, weak)

    def geometry(self, arg: TensorArg) -> views.Geometry:
        offset = tuple(self.int_operand(arg.first + i) for i in range(arg.count))
        return views.Geometry(arg.view, arg.sizes, arg.strides, arg.dtype, offset)

    def value(self, arg: TensorArg | ScalarArg) -> Value:
        if isinstance(arg, ScalarArg):
            return self.number(arg.dtype, arg.slot, weak=True)
        if arg.view == views.SCALAR:
            return self.number(arg.dtype, arg.first, weak=arg.wrapped)
        value = views.read(self, self.bases[arg.storage], self.geometry(arg))
        if arg.view not in (views.WHOLE, views.RESHAPE, views.EMPTY):
            self.strided.add(value.name)
        return value


def stride_order(sizes: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Dims from the outermost to the innermost in memory; None if they tile no dense block."""
    order = sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: -strides[d])
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    full = list(order)
    for d in range(len(sizes)):  # dims of size 1 keep their place relative to their left neighbour
        if sizes[d] == 1:
            full.insert(full.index(d - 1) + 1 if d - 1 in full else 0, d)
    return full


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def new_output(b: CallEmitter, value: Value, meta: torch.Tensor | None) -> tuple[Value, Output]:
    """Lay a new result out as PyTorch's strides ask: its base is in memory order."""
    sizes = value.shape
    strides = tuple(meta.stride()) if meta is not None else contiguous_strides(sizes)
    order = stride_order(sizes, strides) if value.numel else list(range(len(sizes)))
    if order is None:
        strides, order = contiguous_strides(sizes), list(range(len(sizes)))
    value = b.transpose(value, order) if order != list(range(len(sizes))) else value
    return value, Output(-1, -1, value.dtype, sizes, strides, value.dtype, value.shape)


def finish(
    plan: Plan,
    b: CallEmitter,
    storages: Sequence[StorageSpec],
    finished: Sequence[tuple[Value, Output | TensorArg]],
    *,
    keep_unused: bool = False,
    parameter_attributes: Mapping[int, str] | None = None,
    result_attributes: Mapping[int, str] | None = None,
    module_attributes: str = "",
) -> None:
    """Write results through views, drop dead lines, number the parameters, print the text.

    ``finished`` pairs each value with the new tensor it becomes or the argument it is written to.
    ``keep_unused`` keeps one parameter a storage even where the program does not read it.
    Attributes are MLIR text ("mhlo.sharding = ..."): of parameters by storage, of results by
    position in ``finished``, of the module.
    """
    returned = _write_back(b, storages, finished)
    checks: list[Value] = []
    if b.checks:
        checks = [b.first_failure(b.checks)]
        plan.checks = list(b.check_labels)
    results = [v for v, _ in returned] + checks
    if not results:
        plan.outputs = []
        return
    body = "\n".join(eliminate_dead_lines(b._lines, [v.name for v in results]))
    used = set(re.findall(r"%(?:s\d+|ints|floats)\b", body)) | {v.name for v in results}
    plan.parameters = [i for i, v in enumerate(b.parameters) if keep_unused or v.name in used]
    position = {storage: p for p, storage in enumerate(plan.parameters)}
    plan.takes_rng = any(f"%ints [{n}:" in body for n in (b.n_ints, b.n_ints + 1))
    plan.takes_ints = "%ints" in used or plan.takes_rng
    plan.takes_floats = "%floats" in used
    ints = tensor_type((b.n_ints + (2 if plan.takes_rng else 0),), torch.int64)

    attributes: dict[int, list[str]] = {}
    for storage, text in (parameter_attributes or {}).items():
        if storage in position:
            attributes[position[storage]] = [text]
    for place, (base, output) in enumerate(returned):
        donates = -1
        if output.target >= 0 and output.donates in position:
            parameter = position[output.donates]
            if b.parameters[output.donates].type == base.type:
                donates = parameter
                alias = f"tf.aliasing_output = {place} : i32"
                attributes.setdefault(parameter, []).append(alias)
        plan.outputs.append(replace(output, donates=donates))
    parameters = []
    for p, storage in enumerate(plan.parameters):
        base = b.parameters[storage]
        extra = f" {{{', '.join(attributes[p])}}}" if p in attributes else ""
        parameters.append(f"{base.name}: {base.type}{extra}")
    if plan.takes_ints:
        parameters.append(f"%ints: {ints}")
    if plan.takes_floats:
        parameters.append(f"%floats: tensor<{b.n_floats}xf64>")
    types = ", ".join(v.type for v in results)
    names = ", ".join(v.name for v in results)
    signature = types
    if result_attributes:
        extras = [result_attributes.get(i, "") for i in range(len(results))]
        parts = [f"{v.type} {{{e}}}" if e else v.type for v, e in zip(results, extras, strict=True)]
        signature = ", ".join(parts)
    marks = f" attributes {{{module_attributes}}}" if module_attributes else ""
    plan.text = (
        f"module{marks} {{\n  func.func public @main("
        + ", ".join(parameters)
        + f") -> ({signature}) {{\n"
        + body.replace("@INTS@", ints)
        + f"\n    return {names} : {types}\n  }}\n}}\n"
    )
    plan.options = program_options.compile_options()


def _write_back(
    b: CallEmitter,
    storages: Sequence[StorageSpec],
    finished: Sequence[tuple[Value, Output | TensorArg]],
) -> list[tuple[Value, Output]]:
    """New results, then the new bases of what is written.

    Several targets may share a storage (a list of views): writes to one base follow each other.
    """
    new_bases: dict[int, Value] = {}
    first_target: dict[int, TensorArg] = {}
    returned: list[tuple[Value, Output]] = []
    for value, kind in finished:
        if isinstance(kind, Output):
            returned.append((value, kind))
            continue
        if value.numel == 0:
            continue
        spec = storages[kind.storage]
        nbytes = spec.numel * spec.dtype.itemsize
        numel = nbytes // kind.dtype.itemsize
        geometry = b.geometry(kind)
        current = new_bases.get(kind.storage)
        if current is None:
            current = b.bases[kind.storage]
        whole = views.covers_base(geometry, numel)
        flat = None if whole else views.retyped(b, current, kind.dtype)
        flat = views.write(b, flat, numel, geometry, value)
        if whole and kind.dtype is not spec.dtype:
            new_bases[kind.storage] = flat
        else:
            new_bases[kind.storage] = b.reshape(views.retyped(b, flat, spec.dtype), spec.dims)
        first_target.setdefault(kind.storage, kind)
    for index, base in new_bases.items():
        target = first_target[index]
        returned.append(
            (base, Output(target.index, index, target.dtype, (), (), base.dtype, base.shape))
        )
    return returned


_NAMES = re.compile(r"%[A-Za-z0-9_]+")


def eliminate_dead_lines(lines: Sequence[str], live: Sequence[str]) -> list[str]:
    """The lines that results depend on; one line is one operation, regions included."""
    needed = {name.partition("#")[0] for name in live}
    kept = []
    for line in reversed(lines):
        head, _, tail = line.partition(" = ")
        name = head.strip().partition(":")[0]
        if name in needed:
            needed.update(_NAMES.findall(tail))
            kept.append(line)
    kept.reverse()
    return kept
