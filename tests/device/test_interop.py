"""numpy and DLPack: answered as CUDA answers."""

from __future__ import annotations

import numpy
import pytest
import torch


def test_numpy_is_refused_in_cudas_words() -> None:
    x = torch.ones(2, device="tpu")
    with pytest.raises(TypeError, match="can't convert tpu:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        numpy.asarray(x)
    assert x.numpy(force=True).tolist() == [1, 1]
    assert x.cpu().numpy().tolist() == [1, 1]


def test_from_numpy() -> None:
    x = torch.from_numpy(numpy.arange(3.0)).to("tpu")
    assert x.dtype == torch.float64
    assert torch.tensor(numpy.arange(3), device="tpu").tolist() == [0, 1, 2]
    assert torch.as_tensor(numpy.arange(3), device="tpu:1").device.index == 1
    assert torch.asarray([1, 2], device="tpu").tolist() == [1, 2]


def test_python_conversions() -> None:
    x = torch.tensor([[1.5, 2.0]], device="tpu")
    assert x.tolist() == [[1.5, 2.0]]
    assert float(x[0, 0]) == x[0, 0].item() == 1.5
    assert int(torch.tensor(3, device="tpu")) == 3
    assert bool(torch.tensor(True, device="tpu"))
    assert [0, 1, 2][torch.tensor(1, device="tpu")] == 1
    assert f"{torch.tensor(2.5, device='tpu'):.1f}" == "2.5"
    with pytest.raises(RuntimeError):
        x.item()


def test_dlpack_does_not_leave_the_process() -> None:
    # PJRT memory has no address another library could use.
    x = torch.ones(2, device="tpu")
    with pytest.raises((ValueError, BufferError, NotImplementedError)):
        torch.from_dlpack(x)
    with pytest.raises(RuntimeError, match="Unsupported device"):
        numpy.from_dlpack(x)
    same = torch.from_dlpack(x.__dlpack__())
    x.fill_(3)
    assert same.device == x.device and same.tolist() == [3, 3]
    with pytest.raises((RuntimeError, NotImplementedError), match="tpu device"):
        torch.from_dlpack(x[1:].__dlpack__()).cpu()


def test_array_interface() -> None:
    x = torch.ones(2, device="tpu")
    assert not hasattr(x, "__cuda_array_interface__")
