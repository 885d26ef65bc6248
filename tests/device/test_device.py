"""Devices, guards and what they refuse."""

from __future__ import annotations

import re
import threading

import pytest
import torch


def test_counts() -> None:
    assert torch.tpu.is_available()
    assert torch.tpu.device_count() == 2
    assert torch.tpu.current_device() == 0


def test_importing_does_not_start_the_runtime(run_python) -> None:
    code = """
        import sys, torch, torch_tpu
        assert torch.tpu.is_available() and torch.tpu.device_count() == 2
        torch.manual_seed(0)
        torch.randn(3, requires_grad=True).sum().backward()
        assert torch.tpu.memory_stats()["allocated_bytes.all.current"] == 0
        torch.tpu.synchronize()
        assert not torch.tpu.is_initialized()
        torch.tpu.init()
        assert torch.tpu.is_initialized()
    """
    assert run_python(code) == ""


def test_set_device() -> None:
    torch.tpu.set_device(1)
    assert torch.tpu.current_device() == 1
    assert torch.zeros(1, device="tpu").get_device() == 1
    torch.tpu.set_device("tpu:0")
    assert torch.tpu.current_device() == 0
    torch.tpu.set_device(torch.device("tpu", 1))
    torch.tpu.set_device(torch.device("tpu"))
    assert torch.tpu.current_device() == 1
    torch.tpu.set_device(-1)
    assert torch.tpu.current_device() == 1


@pytest.mark.parametrize("call", [torch.tpu.set_device, torch.tpu.synchronize])
def test_no_such_device(call) -> None:
    with pytest.raises(RuntimeError, match=r"invalid device ordinal; got 7; expected 0 to 1"):
        call(7)
    assert torch.tpu.current_device() == 0


def test_a_tensor_on_no_such_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="tpu:7")


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a tpu device, but got: cpu"):
        torch.tpu.set_device("cpu")


def test_device_context() -> None:
    with torch.tpu.device(1):
        assert torch.tpu.current_device() == 1
        with torch.tpu.device("tpu:0"):
            assert torch.tpu.current_device() == 0
        with torch.tpu.device(None), torch.tpu.device(-1):
            assert torch.tpu.current_device() == 1
        assert torch.ones(1, device="tpu").device.index == 1
    assert torch.tpu.current_device() == 0


def test_device_context_restores_after_an_error() -> None:
    with pytest.raises(KeyError), torch.tpu.device(1):
        raise KeyError
    assert torch.tpu.current_device() == 0


def test_device_of() -> None:
    x = torch.ones(1, device="tpu:1")
    with torch.tpu.device_of(x):
        assert torch.tpu.current_device() == 1
    with torch.tpu.device_of(torch.ones(1)), torch.tpu.device_of(3):
        assert torch.tpu.current_device() == 0


def test_ops_run_where_their_operands_are() -> None:
    x = torch.arange(4.0, device="tpu:1")
    y = x * 2 + x.sum()
    assert y.device == torch.device("tpu:1")
    assert y.tolist() == [6, 8, 10, 12]
    assert torch.tpu.current_device() == 0
    assert torch.zeros_like(x).device.index == 1
    assert x.new_zeros(2).device.index == 1


def test_copies_between_devices() -> None:
    x = torch.randn(3, 5)
    there = x.to("tpu:1")
    back = there.to("tpu:0")
    assert (there.device.index, back.device.index) == (1, 0)
    torch.testing.assert_close(back.cpu(), x, rtol=0, atol=0)
    target = torch.empty(5, 3, device="tpu:1").t()
    target.copy_(back)
    torch.testing.assert_close(target.cpu(), x, rtol=0, atol=0)


def test_operands_on_two_devices_are_refused() -> None:
    words = "Expected all tensors to be on the same device"
    with pytest.raises(RuntimeError, match=words):
        torch.ones(2, device="tpu:0") + torch.ones(2, device="tpu:1")
    with pytest.raises(RuntimeError, match=words):
        torch.ones(2, device="tpu") + torch.ones(2)
    assert (torch.ones(2, device="tpu") + torch.tensor(2.0)).tolist() == [3, 3]


def test_the_current_device_belongs_to_the_thread() -> None:
    seen = []

    def work() -> None:
        seen.append(torch.tpu.current_device())
        torch.tpu.set_device(1)
        seen.append(torch.ones(1, device="tpu").device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 1]
    assert torch.tpu.current_device() == 0


def test_torch_device_context_manager() -> None:
    with torch.device("tpu"):
        assert torch.zeros(2).device == torch.device("tpu:0")
    with torch.device("tpu:1"):
        assert torch.nn.Linear(2, 2).weight.device == torch.device("tpu:1")
    assert torch.zeros(2).device.type == "cpu"


def test_tensor_methods() -> None:
    x = torch.ones(2)
    assert not x.is_tpu
    assert x.tpu().is_tpu
    assert x.tpu(1).device.index == 1
    assert x.to("tpu").device == torch.device("tpu:0")
    assert x.to(torch.device("tpu", 1)).device.index == 1
    assert torch.nn.Linear(2, 2).tpu().weight.is_tpu


def test_name_and_properties() -> None:
    name = torch.tpu.get_device_name()
    properties = torch.tpu.get_device_properties(1)
    assert name == properties.name
    if torch.tpu.get_device_capability()[0]:
        assert re.match(r"TPU v(4|5e|5p|6e|7)", name)
    else:
        assert name == "TPU (emulated on XLA:CPU)"
    assert properties.total_memory > 2**28
    assert properties.multi_processor_count == 1
    assert torch.tpu.get_device_capability("tpu:1") == (properties.major, properties.minor)
    assert torch._utils._get_devices_properties([0, 1])[1] == properties


def test_peers() -> None:
    assert torch.tpu.can_device_access_peer(0, 1)
    with pytest.raises(ValueError):
        torch.tpu.can_device_access_peer(1, 1)
    with pytest.raises(RuntimeError):
        torch.tpu.can_device_access_peer(0, 9)


def test_dtypes_of_the_device() -> None:
    supported = torch.accelerator.get_device_capability("tpu")["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64} <= supported
    assert torch.complex32 not in supported
    for dtype in supported:
        assert torch.zeros(2, device="tpu", dtype=dtype).dtype == dtype
