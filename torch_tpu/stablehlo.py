"""``torch_tpu.export``: a model as one StableHLO program, to be run or compiled elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torch_tpu.program import options
from torch_tpu.program.emitter import stride_order
from torch_tpu.program.graph import lower_graph

__all__ = ["Input", "Program", "export"]


@dataclass(frozen=True)
class Input:
    """One parameter of the program's @main, in order.

    kind  "weight" (a parameter, buffer or constant: ``Program.weights[name]``), "input" or "random"
          (two int64: seed and offset of the random numbers)
    """

    name: str
    kind: Literal["weight", "input", "random"]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A portable program.

    text     StableHLO, pretty form, with a public @main
    inputs   what @main takes
    outputs  names, shapes and dtypes of what it returns: new values of mutated buffers first
    weights  tensors that @main takes as parameters; empty if they are part of the text
    """

    text: str
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    weights: Mapping[str, torch.Tensor]

    @property
    def bytecode(self) -> bytes:
        """There is none: raises NotImplementedError, and says what makes it of the text."""
        raise NotImplementedError(
            "export: portable bytecode is written by MLIR's and StableHLO's own libraries, which "
            "neither PyTorch nor a PJRT plug-in offers; the text holds the same program: PJRT "
            "plug-ins take it as it is, and StableHLO's own tool converts it: "
            "stablehlo-translate --serialize program.mlir --target=1.0.0"
        )

    def save(self, path: str | Path) -> None:
        """Write ``path`` (a folder): program.mlir, signature.json and weights.pt."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.mlir").write_text(self.text)
        signature = {"inputs": [asdict(i) for i in self.inputs], "outputs": self.outputs}
        (folder / "signature.json").write_text(json.dumps(signature, indent=2) + "\n")
        torch.save(dict(self.weights), folder / "weights.pt")


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: Literal["separate", "embedded"] = "separate",
    target: Literal["cpu", "tpu"] | None = None,
) -> Program:
    """Export a model for inference.

    model    a module, traced with ``torch.export`` on ``args`` and ``kwargs``, or an exported
             program
    weights  "separate": parameters of @main; "embedded": written into the text
    target   the kind of device to write for; default: the current one

    Raises what torch.export raises, GraphError for an op that cannot become part of a program, and
    NotImplementedError for an exported program with dynamic shapes.
    """
    if weights not in ("separate", "embedded"):
        raise ValueError(f"export: weights={weights!r}; expected 'separate' or 'embedded'")
    if not isinstance(model, torch.export.ExportedProgram):
        model = torch.export.export(model, tuple(args), dict(kwargs or {}))
    functional = model.run_decompositions({})
    graph, signature = functional.graph_module, functional.graph_signature
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("val") for n in placeholders]
    for node, value in zip(placeholders, values, strict=True):
        if isinstance(value, torch.Tensor) and any(not isinstance(d, int) for d in value.shape):
            raise NotImplementedError(
                f"export: input {node.name} has dynamic sizes {tuple(value.shape)}; "
                "export without dynamic_shapes"
            )
    sources = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = {**functional.state_dict, **functional.constants}
    given = {i: tensors[sources[n.name]] for i, n in enumerate(placeholders) if n.name in sources}
    embedded = given if weights == "embedded" else {}
    # A program that leaves this process has nowhere to report an index out of range.
    with options.for_target(target or options.target()), options.without_checks():
        program = lower_graph(graph, values, keep_unused=True, embedded=embedded)
    inputs: list[Input] = []
    used: dict[str, torch.Tensor] = {}
    for parameter in program.arguments:
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.kind == "ints":
            inputs.append(Input("random_state", "random", parameter.shape, dtype))
            continue
        if parameter.kind == "constant":
            name = f"constant_{parameter.index}"
            used[name] = program.constants[parameter.index].detach().cpu()
            inputs.append(Input(name, "weight", parameter.shape, dtype))
            continue
        (position,) = parameter.placeholders
        name = placeholders[position].name
        if name in sources:
            name = sources[name]
            used[name] = _in_memory_order(given[position].detach().cpu(), values[position])
            inputs.append(Input(name, "weight", parameter.shape, dtype))
        else:
            inputs.append(Input(name, "input", parameter.shape, dtype))
    names = [spec.arg.name for spec in signature.output_specs]
    outputs = tuple(
        (name, shape, str(dtype).removeprefix("torch."))
        for name, (shape, dtype) in zip(names, program.results, strict=True)
    )
    return Program(program.text, tuple(inputs), outputs, used)


def _in_memory_order(tensor: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """A weight as @main takes it: dims in the order of the traced tensor's strides."""
    order = stride_order(traced.shape, traced.stride()) or list(range(tensor.dim()))
    return tensor.permute(order).contiguous()
