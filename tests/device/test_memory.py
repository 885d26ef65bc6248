"""Memory figures, pinned host memory."""

from __future__ import annotations

import gc

import pytest
import torch

MIB = 2**20


def test_allocated_follows_tensors() -> None:
    gc.collect()
    before = torch.tpu.memory_allocated()
    x = torch.ones(MIB, device="tpu")
    assert torch.tpu.memory_allocated() - before == 4 * MIB
    view = x[10:]
    assert torch.tpu.memory_allocated() - before == 4 * MIB
    del x
    assert torch.tpu.memory_allocated() - before == 4 * MIB
    del view
    assert torch.tpu.memory_allocated() == before


def test_an_empty_tensor_takes_nothing() -> None:
    before = torch.tpu.memory_allocated()
    x = torch.empty(MIB, device="tpu")
    assert torch.tpu.memory_allocated() == before
    x.fill_(1)
    assert torch.tpu.memory_allocated() == before + 4 * MIB


def test_figures_are_per_device() -> None:
    first, second = torch.tpu.memory_allocated(0), torch.tpu.memory_allocated(1)
    x = torch.ones(MIB, device="tpu:1")
    assert torch.tpu.memory_allocated(0) == first
    assert torch.tpu.memory_allocated("tpu:1") == second + x.nbytes


@pytest.mark.strict_mode
def test_peak() -> None:
    torch.tpu.reset_peak_memory_stats()
    start = torch.tpu.max_memory_allocated()
    assert start == torch.tpu.memory_allocated()
    x = torch.ones(MIB, device="tpu")
    del x
    assert torch.tpu.max_memory_allocated() >= start + 4 * MIB
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == torch.tpu.memory_allocated() == start


def test_stats_have_cudas_keys() -> None:
    x = torch.ones(100, device="tpu")
    stats = torch.tpu.memory_stats()
    for name in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
        for what in ("current", "peak", "allocated", "freed"):
            assert stats[f"{name}.all.{what}"] >= 0
    assert stats["allocated_bytes.all.current"] >= x.nbytes
    assert stats["reserved_bytes.all.peak"] >= stats["reserved_bytes.all.current"] > 0
    assert stats["allocation.all.current"] > 0
    assert stats["num_ooms"] == stats["num_alloc_retries"] == 0
    nested = torch.tpu.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"]
    assert torch.tpu.memory_reserved() <= torch.tpu.max_memory_reserved()


def test_totals_can_be_reset() -> None:
    torch.ones(100, device="tpu")
    torch.tpu.reset_accumulated_memory_stats()
    stats = torch.tpu.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == stats["allocation.all.allocated"] == 0
    assert stats["allocated_bytes.all.current"] == torch.tpu.memory_allocated()


def test_training_leaves_nothing_behind() -> None:
    def step() -> None:
        layer = torch.nn.Linear(8, 8).to("tpu")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(4, 8, device="tpu")).sum().backward()
        optimizer.step()

    step()
    gc.collect()
    torch.tpu.synchronize()
    before = torch.tpu.memory_stats()
    for _ in range(3):
        step()
    gc.collect()
    torch.tpu.synchronize()
    after = torch.tpu.memory_stats()
    for key in ("allocated_bytes.all.current", "allocation.all.current"):
        assert after[key] == before[key]


def test_mem_get_info() -> None:
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total
    assert total == torch.tpu.get_device_properties().total_memory


def test_summary_is_a_table() -> None:
    x = torch.ones(MIB, device="tpu")
    text = torch.tpu.memory_summary()
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "device 0" in text and "Allocated memory" in text and "MiB" in text
    assert len(torch.tpu.memory_summary(abbreviated=True).splitlines()) < len(lines)
    del x


def test_snapshot_lists_buffers() -> None:
    x = torch.ones(10, device="tpu:1")
    segments = torch.tpu.memory_snapshot()
    for device in (0, 1):
        own = [s for s in segments if s["device"] == device]
        held = sum(s["allocated_size"] for s in own)
        assert held == torch.tpu.memory_allocated(device)
        assert own == torch.tpu.memory_snapshot(device)
    assert x.nbytes in [s["blocks"][0]["size"] for s in torch.tpu.memory_snapshot(1)]
    assert torch.tpu.memory._snapshot()["segments"] == torch.tpu.memory_snapshot()


def test_empty_cache() -> None:
    torch.tpu.empty_cache()
    torch.accelerator.empty_cache()


def test_no_such_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.tpu.memory_allocated(5)


class TestPinned:
    def test_pinning(self) -> None:
        torch.tpu.init()
        x = torch.arange(10.0)
        assert not x.is_pinned()
        pinned = x.pin_memory()
        assert pinned.is_pinned() and pinned.device.type == "cpu"
        assert torch.equal(pinned, x)
        assert pinned[3:].is_pinned()
        assert pinned.untyped_storage().is_pinned()
        assert pinned.data_ptr() % 64 == 0
        assert pinned.pin_memory() is pinned

    def test_factories(self) -> None:
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert torch.zeros(0, pin_memory=True).numel() == 0

    def test_copies(self) -> None:
        pinned = torch.arange(1000.0).pin_memory()
        on_device = pinned.to("tpu", non_blocking=True)
        expected = pinned.clone()
        torch.tpu.synchronize()
        pinned.zero_()
        assert torch.equal(on_device.cpu(), expected)
        back = torch.empty(1000, pin_memory=True)
        back.copy_(on_device, non_blocking=True)
        torch.tpu.synchronize()
        assert torch.equal(back, expected)

    def test_a_copy_outlives_its_source(self) -> None:
        copies = [
            torch.full((10_000,), float(i)).pin_memory().to("tpu", non_blocking=True)
            for i in range(8)
        ]
        for i, copy in enumerate(copies):
            assert (copy == i).all()

    def test_a_tensor_of_the_device_cannot_be_pinned(self) -> None:
        with pytest.raises(RuntimeError, match="pin"):
            torch.ones(2, device="tpu").pin_memory()
