"""Ask the real TPU compiler, without a TPU: will it compile, will it fit, how fast will it be?

libtpu (the extra ``torch-tpu[tpu]``) compiles for topologies that are not present::

    compiled = aot.compile(model, tokens, target="v6e-8", train=True)
    compiled.fits, compiled.memory.total, compiled.cost.core_seconds, compiled.mfu

Nothing here has been compared with a chip: figures are the compiler's own estimates and published
bandwidths. docs/aot.md says what they are and what they are not.
"""

from __future__ import annotations

from torch_tpu.aot.capture import capture
from torch_tpu.aot.chips import CHIPS, Chip, Target, resolve, target_names
from torch_tpu.aot.compiled import Compiled, Memory
from torch_tpu.aot.compiler import CompilerCrashError, HbmExceededError
from torch_tpu.aot.cost import CostReport, Row
from torch_tpu.aot.sharding import Mesh, constrain
from torch_tpu.aot.topology import (
    CompiledProgram,
    CompilerNotFoundError,
    Topology,
    TpuCompileError,
    compile_stablehlo,
    topology,
)
from torch_tpu.aot.workload import Failure, Workload, compile

__all__ = [
    "CHIPS",
    "Chip",
    "Compiled",
    "CompiledProgram",
    "CompilerCrashError",
    "CompilerNotFoundError",
    "CostReport",
    "Failure",
    "HbmExceededError",
    "Memory",
    "Mesh",
    "Row",
    "Target",
    "Topology",
    "TpuCompileError",
    "Workload",
    "capture",
    "compile",
    "compile_stablehlo",
    "constrain",
    "resolve",
    "target_names",
    "topology",
]
