"""From a captured graph to the StableHLO text of one, possibly partitioned, program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_tpu.aot import layers
from torch_tpu.aot.capture import Captured, Input
from torch_tpu.aot.sharding import Mesh, Rules, SpecLike, matching, parse_spec
from torch_tpu.aot.tracing import location
from torch_tpu.lowering.interpreter import Interpreter, special
from torch_tpu.program import options
from torch_tpu.program.graph import lower_graph


@dataclass
class Program:
    """``text`` for one device or, with ``partitions`` > 1, for all of a mesh.

    specs       for each input of the capture, how it is divided
    bytes_of    role -> bytes per device of the inputs
    """

    text: str
    partitions: int
    inputs: list[Input]
    specs: list[SpecLike]
    bytes_of: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def write(captured: Captured, mesh: Mesh | None = None, shard: Rules | None = None) -> Program:
    """Write the program for a TPU.

    shard  rules for inputs by name (those of parameters hold for their optimizer state as well);
           what no rule speaks of: parameters over ``fsdp``, arguments by their batch

    Raises ValueError for a rule that does not fit a shape or the mesh.
    """
    specs = [_spec_of(i, mesh, shard) for i in captured.inputs]
    attributes: dict[int, str] = {}
    results: dict[int, str] = {}
    module_attributes = ""
    partitions = mesh.size if mesh is not None else 1
    if mesh is not None and partitions > 1:
        marks = [
            f'mhlo.sharding = "{mesh.annotation(spec, i.shape, i.name)}"'
            for i, spec in zip(captured.inputs, specs, strict=True)
        ]
        attributes = dict(enumerate(marks))
        module_attributes = f"mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = 1 : i32"
        outputs, written = _outputs(captured.graph)
        taken = {result: place for place, result in _donations(captured).items()}
        for n, value in enumerate(outputs):
            mark = f'mhlo.sharding = "{_output_annotation(value, mesh)}"'
            results[n] = marks[taken[n]] if n in taken else mark
        for n, place in enumerate(written):
            results[len(outputs) + n] = marks[place]
    for place, result in _donations(captured).items():
        mark = f"tf.aliasing_output = {result} : i32"
        attributes[place] = f"{attributes[place]}, {mark}" if place in attributes else mark
    bodies = captured.bodies
    bodies.mesh = mesh if partitions > 1 else None
    with (
        options.for_target("tpu"),
        options.without_checks(),
        layers.bodies_in_use(bodies),
    ):
        lowered = lower_graph(
            captured.graph,
            captured.fakes,
            keep_unused=True,
            locate=location,
            parameter_attributes=attributes,
            result_attributes=results,
            module_attributes=module_attributes,
        )
    sizes: dict[str, int] = {}
    for i, spec in zip(captured.inputs, specs, strict=True):
        shape = mesh.local_shape(spec, i.shape) if mesh is not None else i.shape
        sizes[i.role] = sizes.get(i.role, 0) + math.prod(shape) * i.dtype.itemsize
    notes = _undivided(captured.inputs, specs, mesh, shard)
    return Program(lowered.text, partitions, captured.inputs, specs, sizes, notes)


def _undivided(
    inputs: list[Input], specs: list[SpecLike], mesh: Mesh | None, shard: Rules | None
) -> list[str]:
    """A note if parameters that nobody asked to copy have no dim that the mesh divides."""
    size = mesh.sizes.get("fsdp", 1) if mesh is not None else 1
    if size == 1:
        return []
    found = [
        i
        for i, spec in zip(inputs, specs, strict=True)
        if i.role == "parameter"
        and spec is None
        and len(i.shape) - bool(i.layers) > 1
        and not matching(shard, i.name, i.shape)[0]
    ]
    if not found:
        return []
    nbytes = sum(math.prod(i.shape) * i.dtype.itemsize for i in found)
    return [
        f"{len(found)} parameters ({nbytes / 2**30:.2f} GiB) are copied to every device, since "
        f"fsdp = {size} divides none of their dims, first {found[0].name} {found[0].shape}; a mesh "
        "such as {'data': …, 'fsdp': 512} divides them"
    ]


def _donations(captured: Captured) -> dict[int, int]:
    """Donated input -> the result that takes its memory: the first of its shape and dtype."""
    outputs, _ = _outputs(captured.graph)
    free = {n: (tuple(v.shape), v.dtype) for n, v in enumerate(outputs)}
    found: dict[int, int] = {}
    for place in captured.donated:
        i = captured.inputs[place]
        result = next((n for n, spec in free.items() if spec == (i.shape, i.dtype)), None)
        if result is not None:
            found[place] = result
            del free[result]
    return found


def _spec_of(i: Input, mesh: Mesh | None, shard: Rules | None) -> SpecLike:
    if mesh is None:
        return None
    if i.role == "optimizer" and not i.shape:
        return None
    said, spec = matching(shard, i.parameter or i.name, i.shape)
    if said:
        # A rule is written for one layer; the stacking dim in front stays whole.
        return (None, *(spec or ())) if i.layers else spec
    if i.role == "input":
        return mesh.batch_spec(i.shape)
    return mesh.parameter_spec(i.shape, i.layers)


def _outputs(graph: torch.fx.GraphModule) -> tuple[list[Any], list[int]]:
    """Values that are returned as new tensors, and the inputs that are written, in order."""
    places = {n: i for i, n in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    node = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    values = [n.meta["val"] for n in node.args[0] if isinstance(n, torch.fx.Node)]
    written: dict[int, None] = {}
    for n in graph.graph.nodes:
        if n.target is torch.ops.aten.copy_.default and n.args[0] in places:
            written[places[n.args[0]]] = None
    return values, list(written)


def _output_annotation(value: torch.Tensor, mesh: Mesh) -> str:
    shape = tuple(value.shape)
    return mesh.annotation(mesh.batch_spec(shape) if shape else None, shape)


@special("torch_tpu_aot.constrain.default")
def _emit_constraint(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    x, text = args
    mesh = layers.current_bodies().mesh
    if mesh is None:
        return x
    annotation = mesh.annotation(parse_spec(text, mesh)[: x.rank], x.shape, "constrain")
    b = interpreter.b
    line = (
        f'stablehlo.custom_call @Sharding({x.name}) {{mhlo.sharding = "{annotation}"}} '
        f": ({x.type}) -> {x.type}"
    )
    return b.emit(line, x.shape, x.dtype)
