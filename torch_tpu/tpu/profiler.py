"""What ``torch.profiler`` records of device ``tpu``, and how much of it.

The device takes part in every profile that asks for it::

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as prof:
        step()
    print(prof.key_averages().table(sort_by="self_device_time_total"))
    prof.export_chrome_trace("trace.json")

Device rows are executions, named by their op, and copies. An execution lasts from its hand-over, or
the end of the one before it, until its results are ready. Host rows (``tpu::compile …``) are
lowering, compiling, loading from the cache, waiting and ops that run on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from torch._C._profiler import _ExperimentalConfig

__all__ = ["TpuProfilerConfig"]


class TpuProfilerConfig(_ExperimentalConfig):
    """How much to record; given to ``torch.profiler.profile`` as ``experimental_config``.

    Args:
        run_dir: a directory, made if need be, where each profile also leaves the device's spans
            alone as a Chrome trace: ``rank<worker_rank>_<pid>_<start in ns>.tpu.trace.json``.
        host_tracer_level: 0 no host rows; 1 lowering, compiling, loading and CPU fallbacks;
            2 hand-overs and waits too.
        device_tracer_level: 0 no device rows, 1 all.
        python_tracer_level: 0 no lines; 1 each span has the Python line that asked for it.
        worker_rank: for the name of the file.
        experimental_options: there are none yet.
        check_experimental_options: raise ValueError for an option that does not exist; False
            ignores it.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        host_tracer_level: int = 2,
        device_tracer_level: int = 1,
        python_tracer_level: int = 0,
        worker_rank: int | None = None,
        experimental_options: Mapping[str, Any] | None = None,
        check_experimental_options: bool = True,
    ) -> None:
        for name, level, most in (
            ("host_tracer_level", host_tracer_level, 2),
            ("device_tracer_level", device_tracer_level, 1),
            ("python_tracer_level", python_tracer_level, 1),
        ):
            if isinstance(level, bool) or not isinstance(level, int):
                raise TypeError(f"TpuProfilerConfig: {name} is an int; got {level!r}")
            if level < 0:
                raise ValueError(f"TpuProfilerConfig: {name}: got {level}; expected 0 to {most}")
        if experimental_options and check_experimental_options:
            raise ValueError(
                "TpuProfilerConfig: no such experimental options: "
                f"{', '.join(sorted(experimental_options))}; expected none"
            )
        rank = int(os.environ.get("RANK", "0")) if worker_rank is None else worker_rank
        text = (
            f"tpu;host:{host_tracer_level};device:{device_tracer_level};"
            f"lines:{python_tracer_level};rank:{rank}"
        )
        if run_dir is not None:
            path = os.path.abspath(run_dir)
            os.makedirs(path, exist_ok=True)
            text += f";run_dir:{quote(path)}"
        # The one channel from here to a backend's part of kineto, see csrc/core/kineto.cpp.
        super().__init__(custom_profiler_config=text)
        self.run_dir = None if run_dir is None else os.fspath(run_dir)
        self.host_tracer_level = host_tracer_level
        self.device_tracer_level = device_tracer_level
        self.python_tracer_level = python_tracer_level
        self.worker_rank = rank
