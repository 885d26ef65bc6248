"""Allocations with the code that made them, as PyTorch's memory viewer reads them."""

from __future__ import annotations

import gc
import inspect
import pickle

import pytest
import torch

from torch_tpu import _C

pytestmark = pytest.mark.strict_mode  # in Fused mode a buffer belongs to the line that cut

KIB = 1024
memory = torch.tpu.memory


@pytest.fixture(autouse=True)
def stopped():
    gc.collect()
    yield
    memory._record_memory_history(None)
    assert _C.activity_flags() == 0


def trace(device: int = 0) -> list[dict]:
    return memory._snapshot()["device_traces"][device]


def make(n: int) -> torch.Tensor:
    return torch.ones(n * KIB, dtype=torch.uint8, device="tpu")  # here


MAKE_LINE = inspect.getsourcelines(make)[1] + 1


def frames_of(size: int) -> list[dict]:
    (event,) = [e for e in trace() if e["action"] == "alloc" and e["size"] == size]
    return event["frames"]


def test_an_allocation_has_its_stack() -> None:
    memory._record_memory_history()
    x = make(33)
    op, inner, outer = frames_of(33 * KIB)[:3]
    assert op["name"] == "aten::ones"
    assert (inner["filename"], inner["line"], inner["name"]) == (__file__, MAKE_LINE, "make")
    assert outer["name"] == "test_an_allocation_has_its_stack"
    del x
    actions = [(e["action"], e["size"]) for e in trace()]
    assert actions.index(("alloc", 33 * KIB)) < actions.index(("free_completed", 33 * KIB))
    addresses = {e["addr"] for e in trace() if e["size"] == 33 * KIB}
    assert len(addresses) == 1


def test_snapshot_knows_what_is_alive() -> None:
    before = make(34)
    memory._record_memory_history()
    x, gone = make(35), make(36)
    del gone
    blocks = {s["total_size"]: s["blocks"][0] for s in memory.memory_snapshot(0)}
    assert 36 * KIB not in blocks
    assert blocks[35 * KIB]["frames"][1]["line"] == MAKE_LINE
    assert len(blocks[34 * KIB]["frames"]) == 1  # from before: its op only
    assert all(b["state"] == "active_allocated" for b in blocks.values())
    assert all("frames" in s for s in memory._snapshot()["segments"])
    del before, x


def test_events_add_up() -> None:
    memory._record_memory_history()
    start = torch.tpu.memory_allocated()
    x = torch.randn(64, 64, device="tpu", requires_grad=True)
    y = (x @ x).relu().sum()
    y.backward()
    x.grad.mul_(2)  # donates
    del y
    change = sum(e["size"] if e["action"] == "alloc" else -e["size"] for e in trace())
    assert change == torch.tpu.memory_allocated() - start
    live = set()
    for event in trace():
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live.add(event["addr"])
        else:
            live.discard(event["addr"])
    assert live <= {s["address"] for s in memory.memory_snapshot(0)}


def test_a_gradient_belongs_to_its_forward_line() -> None:
    memory._record_memory_history()
    x = torch.ones(37 * KIB, device="tpu", requires_grad=True)
    line = inspect.currentframe().f_lineno + 1
    y = x.exp()
    y.sum().backward()
    backward = [f for e in trace() for f in e["frames"] if "(backward of it)" in f["name"]]
    assert (__file__, line) in {(f["filename"], f["line"]) for f in backward}


def test_copies_are_recorded() -> None:
    memory._record_memory_history()
    x = torch.zeros(38 * KIB, dtype=torch.uint8).to("tpu")
    assert frames_of(38 * KIB)[0]["name"] == "copy to the device"
    assert frames_of(38 * KIB)[1]["filename"] == __file__
    del x


def test_bounds_and_variants() -> None:
    memory._record_memory_history(max_entries=3)
    for _ in range(5):
        make(1)
    assert len(trace()) == 3
    memory._record_memory_history("state")
    x = make(39)
    assert trace() == []
    blocks = {s["total_size"]: s["blocks"][0] for s in memory.memory_snapshot(0)}
    assert blocks[39 * KIB]["frames"][1]["line"] == MAKE_LINE
    memory._record_memory_history(context=None)
    y = make(40)
    assert len(frames_of(40 * KIB)) == 1
    memory._record_memory_history(None)
    make(41)
    assert not [e for e in trace() if e["size"] == 41 * KIB]
    with pytest.raises(ValueError, match="got 'everything'; expected all or state"):
        memory._record_memory_history("everything")
    with pytest.raises(ValueError, match="expected python or all"):
        memory._record_memory_history(stacks="c")
    del x, y


def test_pytorchs_viewer_reads_it(tmp_path) -> None:
    memory_viz = pytest.importorskip("torch.cuda._memory_viz")
    memory._record_memory_history()
    x = make(42)
    path = tmp_path / "snapshot.pickle"
    memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert f"segments: {len(snapshot['segments'])}\n" in memory_viz.segsum(snapshot)
    assert "TOTAL MEM: 42.0KiB" in memory_viz.trace(snapshot)
    assert "<html" in memory_viz.trace_plot(snapshot).lower()
    assert "<html" in memory_viz.segment_plot(snapshot).lower()
    del x


def test_text_by_line() -> None:
    memory._record_memory_history()
    big = [make(5000) for _ in range(2)]
    small = torch.ones(10, device="tpu")
    lines = torch.tpu.memory_by_line().splitlines()
    assert lines[0].startswith("torch.tpu memory of device 0: ")
    first = lines[1].split()
    assert first[:2] == ["9.8", "MiB"] and first[4:7] == ["2", "x", "aten::ones"]
    assert f"{__file__}:{MAKE_LINE} in make" in lines[1]
    assert "more places" in torch.tpu.memory_by_line(top=1)
    del big, small


def test_the_profiler_counts_memory() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        x = make(43)
    (made,) = [e for e in prof.key_averages() if e.key == "aten::ones"]
    assert made.self_device_memory_usage == 43 * KIB
    del x
