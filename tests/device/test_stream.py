"""Streams: names that are current in a thread."""

from __future__ import annotations

import threading

import pytest
import torch


def test_default_stream() -> None:
    assert torch.tpu.default_stream().stream_id == 0
    assert torch.tpu.current_stream() == torch.tpu.default_stream()
    assert torch.tpu.default_stream(1).device == torch.device("tpu:1")


def test_new_streams_differ() -> None:
    first, second = torch.tpu.Stream(), torch.tpu.Stream(device=1)
    assert first != second
    assert first != torch.tpu.default_stream()
    assert (first.device.index, second.device.index) == (0, 1)
    assert isinstance(first, torch.Stream)
    assert first != "a stream"
    assert (
        len(
            {
                first,
                second,
                torch.tpu.Stream(
                    stream_id=first.stream_id, device_index=0, device_type=first.device_type
                ),
            }
        )
        == 2
    )
    assert "tpu:1" in repr(second)


def test_generic_streams() -> None:
    stream = torch.Stream(device="tpu:1")
    assert (stream.device.type, stream.device_index) == ("tpu", 1)
    assert torch.Stream("tpu").device_index == 0
    with torch.Stream(device="tpu:1") as entered:
        assert torch.accelerator.current_stream() == entered
        assert torch.tpu.current_device() == 1
    assert torch.tpu.current_device() == 0


def test_priority() -> None:
    assert torch.tpu.Stream().priority == 0
    assert torch.tpu.Stream(priority=-3).priority == -1
    assert torch.tpu.Stream.priority_range() == (0, -1)


def test_stream_context() -> None:
    outer, inner = torch.tpu.Stream(), torch.tpu.Stream(device=1)
    with torch.tpu.stream(outer):
        assert torch.tpu.current_stream() == outer
        with torch.tpu.stream(inner):
            assert torch.tpu.current_stream() == inner
            assert torch.tpu.current_device() == 1
            assert torch.tpu.current_stream(0) == outer
        assert torch.tpu.current_stream() == outer
        assert torch.tpu.current_device() == 0
        assert torch.tpu.current_stream(1) == torch.tpu.default_stream(1)
    with torch.tpu.stream(None):
        assert torch.tpu.current_stream() == torch.tpu.default_stream()


def test_set_stream() -> None:
    stream = torch.tpu.Stream(device=1)
    torch.tpu.set_stream(stream)
    assert torch.tpu.current_device() == 1
    assert torch.accelerator.current_stream() == stream
    torch.tpu.set_stream(torch.tpu.default_stream(1))
    torch.accelerator.set_stream(torch.tpu.default_stream(0))
    assert torch.tpu.current_device() == 0


def test_the_current_stream_belongs_to_the_thread() -> None:
    seen = []
    with torch.tpu.stream(torch.tpu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.tpu.default_stream()]


def test_query_and_synchronize(busy) -> None:
    stream = torch.tpu.Stream()
    torch.tpu.synchronize()
    assert stream.query()
    with torch.tpu.stream(stream):
        result = busy()
    stream.synchronize()
    assert stream.query()
    assert result.isfinite().all()


def test_waiting() -> None:
    first, second = torch.tpu.Stream(), torch.tpu.Stream()
    with torch.tpu.stream(first):
        x = torch.arange(4, device="tpu")
    event = first.record_event()
    assert isinstance(event, torch.tpu.Event)
    second.wait_event(event)
    second.wait_stream(first)
    torch.Stream("tpu").wait_stream(torch.Stream("tpu"))
    with torch.tpu.stream(second):
        assert (x * 2).tolist() == [0, 2, 4, 6]
    x.record_stream(second)


def test_a_stream_has_no_native_handle() -> None:
    with pytest.raises(NotImplementedError, match="native handle"):
        _ = torch.tpu.Stream().native_handle
    assert not torch.tpu.is_current_stream_capturing()
