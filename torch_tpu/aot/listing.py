"""An optimised program as text, in the manner of HLO."""

from __future__ import annotations

from torch_tpu.aot.hlo import Computation, Instruction, Module


def listing(module: Module) -> str:
    """Each computation with its instructions; the entry comes last, as XLA prints it."""
    order = [c for c in module.computations.values() if c.id != module.entry]
    parts = [_computation(module, c) for c in order]
    parts.append("ENTRY " + _computation(module, module.entry_computation))
    return f"HloModule {module.name}\n\n" + "\n\n".join(parts) + "\n"


def _computation(module: Module, computation: Computation) -> str:
    lines = [_instruction(module, computation, i) for i in computation.instructions]
    return f"%{computation.name} {{\n" + "\n".join(lines) + "\n}"


def _instruction(module: Module, computation: Computation, i: Instruction) -> str:
    operands = ", ".join(
        f"%{computation.by_id[o].name}" if o in computation.by_id else f"%{o}" for o in i.operands
    )
    if i.opcode == "parameter":
        operands = str(i.parameter)
    elif i.integer is not None:
        operands = str(i.integer)
    root = "ROOT " if i.id == computation.root else ""
    text = f"  {root}%{i.name} = {i.shape} {i.opcode}({operands})"
    if i.opcode == "get-tuple-element":
        text += f", index={i.tuple_index}"
    if i.called:
        names = ", ".join(f"%{module.computations[c].name}" for c in i.called)
        text += f", calls={{{names}}}"
    if i.custom_call_target:
        text += f', custom_call_target="{i.custom_call_target}"'
    source = module.source_of(i)
    if source.name or source.file:
        text += f', metadata={{op_name="{source.name}" {source.file}:{source.line}}}'
    return text
