"""Saving, loading, copying, pickling."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch


def saved(obj) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_round_trip(dtype) -> None:
    x = torch.arange(6, device="tpu").reshape(2, 3).to(dtype)
    y = torch.load(saved(x))
    assert y.device == torch.device("tpu:0")
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), x.cpu())
    assert (y == y).all()  # it can be computed with


@pytest.mark.parametrize("location", ["tpu:1", torch.device("tpu:1"), {"tpu:0": "tpu:1"}])
def test_map_location(location) -> None:
    y = torch.load(saved(torch.arange(3.0, device="tpu")), map_location=location)
    assert y.device == torch.device("tpu:1")
    assert (y + 1).tolist() == [1, 2, 3]


def test_map_location_between_cpu_and_device() -> None:
    x = torch.arange(3.0)
    assert torch.load(saved(x), map_location="tpu").device == torch.device("tpu:0")
    assert torch.load(saved(x.to("tpu")), map_location="cpu").tolist() == [0, 1, 2]
    moved = torch.load(saved(x.to("tpu")), map_location=lambda storage, location: storage)
    assert moved.device.type == "cpu"


def test_no_such_device() -> None:
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(saved(torch.ones(1)), map_location="tpu:7")


def test_views_stay_views() -> None:
    base = torch.arange(6.0, device="tpu")
    pair = torch.load(saved([base, base[2:4]]))
    pair[1].fill_(9)
    assert pair[0].tolist() == [0, 1, 9, 9, 4, 5]


def test_strides_and_offsets() -> None:
    x = torch.arange(12.0, device="tpu").reshape(3, 4).t()[1:]
    y = torch.load(saved(x))
    assert y.stride() == x.stride()
    assert torch.equal(y.cpu(), x.cpu())


def test_a_checkpoint_loads_without_the_backend(run_python, tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3, device="tpu")).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    code = f"""
        import sys, torch
        state = torch.load({str(path)!r}, map_location="cpu", weights_only=True)
        assert "torch_tpu" not in sys.modules
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model.load_state_dict(state["model"])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(state["optimizer"])
        print(model[0].weight.sum().item())
    """
    printed = run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert float(printed) == pytest.approx(model[0].weight.sum().item(), rel=1e-6)


def test_state_dict_round_trip() -> None:
    first, second = (torch.nn.Linear(3, 3).to("tpu") for _ in range(2))
    second.load_state_dict(torch.load(saved(first.state_dict())))
    assert torch.equal(first.weight, second.weight)
    second.load_state_dict(torch.nn.Linear(3, 3).state_dict())
    assert second.weight.device.type == "tpu"
    meta = torch.nn.Linear(3, 3, device="meta")
    meta.load_state_dict(first.state_dict(), assign=True)
    assert meta.weight.device.type == "tpu"


def test_optimizer_state_follows_the_parameters() -> None:
    layer = torch.nn.Linear(2, 2).to("tpu")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2, device="tpu")).sum().backward()
    optimizer.step()
    state = torch.load(saved(optimizer.state_dict()), map_location="cpu")
    other = torch.optim.AdamW(layer.parameters(), lr=0.1)
    other.load_state_dict(state)
    for values in other.state.values():
        assert values["exp_avg"].device.type == "tpu"


def test_deepcopy() -> None:
    x = torch.arange(4.0, device="tpu:1")
    y, view = copy.deepcopy((x, x[1:]))
    assert y.device == x.device
    view.zero_()
    assert y.tolist() == [0, 0, 0, 0]
    assert x.tolist() == [0, 1, 2, 3]
    parameter = torch.nn.Parameter(x)
    twin = copy.deepcopy(parameter)
    assert isinstance(twin, torch.nn.Parameter) and twin.requires_grad
    assert twin.data_ptr() != parameter.data_ptr()


def test_deepcopy_of_a_module_keeps_ties() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Linear(2, 2).to("tpu")
    model.b = torch.nn.Linear(2, 2)
    model.b.weight = model.a.weight
    twin = copy.deepcopy(model)
    assert twin.a.weight is twin.b.weight
    assert twin.a.weight is not model.a.weight


def test_pickle() -> None:
    x = torch.arange(3, device="tpu:1")
    y = pickle.loads(pickle.dumps(x))
    assert y.device == x.device
    assert y.tolist() == [0, 1, 2]
    layer = pickle.loads(pickle.dumps(torch.nn.Linear(2, 2).to("tpu")))
    assert layer(torch.ones(1, 2, device="tpu")).shape == (1, 2)
    assert pickle.loads(pickle.dumps(torch.device("tpu:1"))) == torch.device("tpu:1")


def test_repr() -> None:
    x = torch.arange(3.0, device="tpu")
    assert repr(x) == "tensor([0., 1., 2.], device='tpu:0')"
    assert "requires_grad=True" in repr(torch.ones(1, device="tpu:1", requires_grad=True))
