"""Storages as PyTorch's generic code uses them."""

from __future__ import annotations

import pytest
import torch


def test_identity() -> None:
    x = torch.arange(6.0, device="tpu")
    storage = x.untyped_storage()
    assert storage.is_tpu
    assert storage.device == torch.device("tpu:0")
    assert storage.nbytes() == 24
    assert x[2:].untyped_storage().data_ptr() == storage.data_ptr() != 0
    assert x.clone().data_ptr() != x.data_ptr()
    assert x[2:].data_ptr() == x.data_ptr() + 8
    assert x.is_set_to(x.view(-1))


def test_moving() -> None:
    storage = torch.arange(4, dtype=torch.int32).untyped_storage()
    there = storage.tpu()
    assert there.is_tpu and there.get_device() == 0
    assert storage.to(device="tpu:1").get_device() == 1
    assert there.cpu().tolist() == storage.tolist()
    assert there.tpu(1).get_device() == 1


def test_set_() -> None:
    x = torch.arange(6.0, device="tpu")
    y = torch.empty(0, device="tpu")
    y.set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    assert y.tolist() == [[2, 3], [4, 5]]
    y.fill_(0)
    assert x.tolist() == [0, 1, 0, 0, 0, 0]
    z = torch.empty(0, device="tpu").set_(x)
    assert z.data_ptr() == x.data_ptr()


def test_resize() -> None:
    x = torch.arange(6.0, device="tpu")
    x.resize_(2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    x.resize_(8)
    assert x[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_storages_are_freed_and_grown_again() -> None:
    x = torch.arange(1000.0, device="tpu")
    before = torch.tpu.memory_allocated()
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    assert torch.tpu.memory_allocated() == before - 4000
    x.untyped_storage().resize_(4000)
    x.copy_(torch.ones(1000))
    assert x.sum().item() == 1000


def test_data_assignment() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, device="tpu"))
    replacement = torch.ones(3, device="tpu")
    parameter.data = replacement
    assert parameter.shape == (3,)
    assert parameter.data_ptr() == replacement.data_ptr()
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.data = replacement  # from the host to the device, as with CUDA
    assert parameter.device == replacement.device
    parameter.data = torch.zeros(1)
    assert parameter.device.type == "cpu"
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.eye(2, device="tpu").cpu().to_sparse()


def test_dtype_views() -> None:
    x = torch.tensor([1.0, -2.0], device="tpu")
    bits = x.view(torch.int32)
    assert bits.tolist() == torch.tensor([1.0, -2.0]).view(torch.int32).tolist()
    bits[0] = 0
    assert x.tolist() == [0, -2]


def test_untyped_storage_of_the_device() -> None:
    storage = torch.UntypedStorage(16, device="tpu:1")
    assert storage.device == torch.device("tpu:1")
    x = torch.empty(0, dtype=torch.int32, device="tpu:1").set_(storage, 0, (4,), (1,))
    x.fill_(3)
    assert x.tolist() == [3, 3, 3, 3]


def test_shared_memory() -> None:
    x = torch.ones(2, device="tpu")
    assert x.share_memory_() is x  # as on CUDA: nothing to do for memory of a device
    with pytest.raises(RuntimeError, match="only available on CPU"):
        torch.multiprocessing.reductions.reduce_storage(x.untyped_storage())


def test_fresh_tensors_do_not_share() -> None:
    pointers = {torch.empty(4, device="tpu").data_ptr() for _ in range(3)}
    tensors = [torch.empty(0, device="tpu") for _ in range(3)]
    assert len(pointers) == 3 and len(tensors) == 3
