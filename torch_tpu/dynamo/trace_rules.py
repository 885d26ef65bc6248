"""Which of the device's own functions TorchDynamo leaves alone.

Dynamo skips PyTorch's files by their place, those of this package it would trace: lowerings that
an op enters between two graphs, too (csrc/dispatch/untraced.h sees to what those call in turn).
What reads or changes the state of the process is called as it is, as ``torch.cuda``'s is.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["install"]

_SKIPPED = (
    "torch_tpu.aot",
    "torch_tpu.dynamo",
    "torch_tpu.eager",
    "torch_tpu.lowering",
    "torch_tpu.program",
    "torch_tpu.tpu.memory",
    "torch_tpu.tpu.memory_history",
    "torch_tpu.tpu.profiler",
    "torch_tpu.tpu.programs",
    "torch_tpu.tpu.random",
)


def install(rules: ModuleType) -> None:
    """``rules`` is ``torch._dynamo.trace_rules``, just imported."""
    for name in _SKIPPED:
        rules.add(name)
