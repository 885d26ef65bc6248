"""Events: they capture the work in flight and know when it ended."""

from __future__ import annotations

import time

import pytest
import torch


def test_a_new_event_is_complete() -> None:
    event = torch.tpu.Event()
    assert event.query()
    event.synchronize()
    assert "not recorded" in repr(event)


def test_an_event_is_complete_when_its_work_is(busy) -> None:
    busy()  # compile
    torch.tpu.synchronize()
    result = busy()
    event = torch.tpu.Event()
    event.record()
    event.synchronize()
    assert event.query()
    assert torch.tpu.current_stream().query()
    assert result.isfinite().all()
    assert isinstance(event, torch.Event)


def test_recording_again_captures_later_work(busy) -> None:
    event = torch.tpu.Event(enable_timing=True)
    first = torch.tpu.Event(enable_timing=True)
    event.record()
    first.record()
    result = busy()
    event.record()
    event.synchronize()
    assert first.elapsed_time(event) > 0
    del result


def test_elapsed_time_is_the_time_the_work_took(busy) -> None:
    busy().sum().item()
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    torch.tpu.synchronize()
    begin = time.perf_counter()
    start.record()
    result = busy()
    end.record()
    end.synchronize()
    wall = (time.perf_counter() - begin) * 1e3
    elapsed = start.elapsed_time(end)
    assert 0 < elapsed <= wall
    assert elapsed > wall / 4
    assert end.elapsed_time(start) == pytest.approx(-elapsed)
    del result


def test_time_of_idle_recordings() -> None:
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    torch.tpu.synchronize()
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 19 < start.elapsed_time(end) < 200


def test_elapsed_time_needs_timing_and_recording() -> None:
    timed, untimed = torch.tpu.Event(enable_timing=True), torch.tpu.Event()
    timed.record()
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(untimed)
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.tpu.Event(enable_timing=True))


def test_an_event_keeps_its_device() -> None:
    event = torch.tpu.Event()
    event.record(torch.tpu.current_stream(1))
    assert event.device == torch.device("tpu:1")
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(torch.tpu.current_stream(0))


def test_waiting_for_an_event() -> None:
    event = torch.tpu.Event()
    event.record()
    event.wait()
    event.wait(torch.tpu.Stream(device=1))
    torch.Event("tpu", enable_timing=True).record(torch.tpu.Stream())


def test_interprocess_events_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="between processes"):
        torch.tpu.Event(interprocess=True)
    with pytest.raises(NotImplementedError):
        torch.tpu.Event().ipc_handle()


@pytest.mark.not_debug
def test_a_failed_index_is_raised_by_the_event() -> None:
    x = torch.arange(4.0, device="tpu")
    bad = x.index_select(0, torch.tensor([7], device="tpu"))
    event = torch.tpu.Event()
    event.record()
    with pytest.raises(IndexError, match="index out of range"):
        event.synchronize()
    del bad
