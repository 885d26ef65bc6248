"""See :mod:`torch_tpu.tpu.profiler`."""

from __future__ import annotations

from torch_tpu.tpu.profiler import TpuProfilerConfig

__all__ = ["TpuProfilerConfig"]
