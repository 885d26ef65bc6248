"""Modules on the device: identity, ties, buffers, dtype."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)) * self.scale


def test_parameters_keep_their_identity() -> None:
    layer = nn.Linear(3, 3)
    weight = layer.weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.to("tpu")
    assert layer.weight is weight
    assert weight.device.type == "tpu"
    layer(torch.ones(1, 3, device="tpu")).sum().backward()
    before = weight.detach().cpu().clone()
    optimizer.step()
    torch.testing.assert_close(layer.weight.cpu(), before - 1)


def test_tied_weights_stay_tied() -> None:
    model = Tied().to("tpu")
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    assert model.scale.device.type == model.scratch.device.type == "tpu"
    model(torch.tensor([1, 2], device="tpu")).sum().backward()
    assert model.embed.weight.grad is model.head.weight.grad
    assert "scratch" not in model.state_dict()


def test_there_and_back() -> None:
    model = Tied()
    expected = model(torch.tensor([3]))
    there = model.to("tpu")(torch.tensor([3], device="tpu"))
    torch.testing.assert_close(there.cpu(), expected)
    back = model.to("cpu")(torch.tensor([3]))
    torch.testing.assert_close(back, expected)


def test_gradients_move_along() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    grad = layer.weight.grad.clone()
    layer.to("tpu")
    assert layer.weight.grad.device.type == "tpu"
    assert torch.equal(layer.weight.grad.cpu(), grad)


def test_dtype_and_device_together() -> None:
    layer = nn.Linear(2, 2).to("tpu:1", torch.bfloat16)
    assert (layer.weight.device.index, layer.weight.dtype) == (1, torch.bfloat16)
    assert layer.float().weight.dtype == torch.float32
    assert layer.tpu(0).weight.device.index == 0


def test_to_empty_from_meta() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    layer.to_empty(device="tpu")
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert layer(torch.ones(1, 2, device="tpu")).tolist() == [[2, 2]]


def test_recurrent_module_on_the_device() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    expected, _ = lstm(x)
    got, _ = lstm.to("tpu")(x.to("tpu"))
    torch.testing.assert_close(got.cpu(), expected)


def test_packed_sequences() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert not packed.is_tpu
    there = packed.tpu()
    assert there.is_tpu
    assert there.batch_sizes.device.type == "cpu"
    assert nn.utils.rnn.pad_packed_sequence(there)[0].device.type == "tpu"


def test_hooks_see_device_tensors() -> None:
    seen = []
    layer = nn.Linear(2, 2).to("tpu")
    layer.register_forward_hook(lambda module, args, output: seen.append(output.device.type))
    layer.register_full_backward_hook(lambda module, gin, gout: seen.append(gout[0].device.type))
    layer(torch.ones(1, 2, device="tpu")).sum().backward()
    assert seen == ["tpu", "tpu"]


def test_parameter_sharing_by_swap() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = nn.Linear(2, 2)
        weight = layer.weight
        layer.to("tpu")
        assert layer.weight is weight and weight.device.type == "tpu"
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
