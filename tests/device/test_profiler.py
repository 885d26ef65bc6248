"""torch.profiler: spans of the device in tables and Chrome traces."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from torch_tpu import _C
from torch_tpu.program import source_lines
from torch_tpu.tpu.profiler import TpuProfilerConfig

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


@pytest.fixture(autouse=True)
def nothing_left_on():
    yield
    assert _C.activity_flags() == 0


def work() -> None:
    x = torch.arange(64.0).view(8, 8).to("tpu")
    for _ in range(3):
        x = x.sin()
    x.sum().item()


def on_device(event) -> bool:
    return event.device_type == torch.autograd.DeviceType.PrivateUse1


def device_events(prof) -> list:
    return [e for e in prof.events() if on_device(e)]


def test_table_and_links() -> None:
    work()
    with profile(activities=BOTH) as prof:
        work()
    counts = {e.key: e.count for e in prof.key_averages() if on_device(e)}
    assert counts["aten::sin"] == 3 and counts["aten::sum"] == 1
    assert counts["Memcpy HtoD"] == 1 and counts["Memcpy DtoH"] == 1
    table = prof.key_averages().table(sort_by="self_device_time_total")
    assert "Self TPU" in table and "Memcpy HtoD" in table
    on_cpu = [e for e in prof.key_averages() if not on_device(e)]
    (sin,) = [e for e in on_cpu if e.key == "aten::sin"]
    assert sin.self_device_time_total > 0  # each execution belongs to the op that asked for it
    executed = [e for e in device_events(prof) if e.name == "aten::sin"]
    assert sum(e.time_range.elapsed_us() for e in executed) == pytest.approx(
        sin.self_device_time_total, rel=0.01
    )


def test_programs_follow_each_other() -> None:
    with profile(activities=BOTH) as prof:
        work()
    programs = [e for e in device_events(prof) if e.name.startswith("aten::")]
    programs.sort(key=lambda e: e.time_range.start)
    assert len(programs) >= 4
    for before, after in itertools.pairwise(programs):
        assert before.time_range.end <= after.time_range.start + 0.01


def test_chrome_trace(tmp_path) -> None:
    _C.clear_programs()
    with profile(activities=BOTH) as prof:
        work()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    by_name = {e["name"]: e for e in events if e.get("ph") == "X" and "args" in e}
    kernel = next(e for e in events if e.get("cat") == "kernel" and e["name"] == "aten::sin")
    assert kernel["dur"] >= 0
    assert f"{__file__}:" in kernel["args"]["line"] and "in work" in kernel["args"]["line"]
    assert by_name["tpu::lower aten::sin"]["cat"] == "privateuse1_runtime"
    made = [n for n in by_name if n in ("tpu::compile aten::sin", "tpu::load aten::sin")]
    assert len(made) == 1
    assert by_name["tpu::wait aten::sum"]["args"]["op"] == "aten::sum"
    copy = next(e for e in events if e["name"] == "Memcpy HtoD")
    assert copy["args"]["bytes"] == 256


def test_cpu_profiles_show_no_device_rows() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        work()
    assert device_events(prof) == []


def test_schedule_and_several_sessions() -> None:
    seen = []

    def ready(prof) -> None:
        seen.append({e.key: e.count for e in prof.key_averages() if "sin" in e.key})

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(activities=BOTH, schedule=schedule, on_trace_ready=ready) as prof:
        for _ in range(8):
            work()
            prof.step()
    assert len(seen) == 2
    assert [counts["aten::sin"] for counts in seen] == [6, 6]


def config_events(config: TpuProfilerConfig) -> list:
    with profile(activities=BOTH, experimental_config=config) as prof:
        work()
    return [e for e in prof.events() if e.name.startswith(("tpu::", "Memcpy"))]


def test_levels() -> None:
    work()
    assert config_events(TpuProfilerConfig(host_tracer_level=0, device_tracer_level=0)) == []
    names = {e.name for e in config_events(TpuProfilerConfig(host_tracer_level=2))}
    assert {"Memcpy HtoD", "tpu::launch aten::sin"} <= names
    names = {e.name for e in config_events(TpuProfilerConfig(host_tracer_level=1))}
    assert "Memcpy HtoD" in names and not any(n.startswith("tpu::launch") for n in names)


def test_run_dir(tmp_path) -> None:
    config = TpuProfilerConfig(tmp_path / "runs = #1", python_tracer_level=1, worker_rank=3)
    with profile(activities=BOTH, experimental_config=config):
        work()
    (path,) = (tmp_path / "runs = #1").iterdir()
    assert path.name.startswith("rank3_") and path.name.endswith(".tpu.trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    executed = [e for e in events if e["name"] == "aten::sin" and e["pid"] == "tpu:0"]
    assert len(executed) == 3 and all(e["dur"] >= 0 for e in executed)
    assert "in work" in executed[0]["args"]["line"]


def test_config_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match="host_tracer_level is an int; got '2'"):
        TpuProfilerConfig(host_tracer_level="2")
    with pytest.raises(ValueError, match="python_tracer_level: got -1; expected 0 to 1"):
        TpuProfilerConfig(python_tracer_level=-1)
    with pytest.raises(ValueError, match="no such experimental options: speed"):
        TpuProfilerConfig(experimental_options={"speed": 1})
    config = TpuProfilerConfig(
        experimental_options={"speed": 1}, check_experimental_options=False, device_tracer_level=0
    )
    assert (config.host_tracer_level, config.device_tracer_level) == (2, 0)
    from torch_tpu._internal.profiler import TpuProfilerConfig as same

    assert same is TpuProfilerConfig


def test_the_lines_own_helper() -> None:
    line = source_lines.current_line()
    assert line.file == __file__ and line.function == "test_the_lines_own_helper"
    assert line.text == "line = source_lines.current_line()"
    assert source_lines.is_library(torch.__file__) and source_lines.is_library(json.__file__)
    assert not source_lines.is_library(pytest.__file__)
    assert not source_lines.is_library("<stdin>") and source_lines.is_library("<frozen runpy>")
