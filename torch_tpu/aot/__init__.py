"""Ask the real TPU compiler, without a TPU.

libtpu (the extra ``torch-tpu[tpu]``) compiles for topologies that are not present: whether a
program compiles, what memory it needs, what the compiler made of it.
"""

from __future__ import annotations

from torch_tpu.aot.topology import (
    CompiledProgram,
    CompilerNotFoundError,
    Topology,
    TpuCompileError,
    compile_stablehlo,
    topology,
)

__all__ = [
    "CompiledProgram",
    "CompilerNotFoundError",
    "Topology",
    "TpuCompileError",
    "compile_stablehlo",
    "topology",
]
