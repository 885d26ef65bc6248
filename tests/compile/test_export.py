"""torch_tpu.export: programs for elsewhere, here run through the device's own plug-in."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import torch_tpu
from torch_tpu import stablehlo
from torch_tpu.lowering.interpreter import GraphError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) + self.shift


def test_weights_apart_or_in_the_text():
    model, x = Net().eval(), torch.randn(2, 8)
    apart = torch_tpu.export(model, (x,))
    assert {i.name for i in apart.inputs if i.kind == "weight"} == set(model.state_dict())
    assert [(i.shape, i.dtype) for i in apart.inputs if i.kind == "input"] == [((2, 8), "float32")]
    for name, tensor in apart.weights.items():
        assert torch.equal(tensor, model.state_dict()[name])
    whole = torch_tpu.export(model, (x,), weights="embedded")
    assert [i.kind for i in whole.inputs] == ["input"]
    assert not whole.weights
    assert whole.outputs[0][1:] == ((2, 4), "float32")


def test_both_forms_compile_for_a_tpu_target_in_text():
    text = torch_tpu.export(Net(), (torch.randn(2, 8),), target="tpu").text
    assert "func.func public @main" in text


def test_a_saved_program_can_be_read_again(tmp_path):
    program = torch_tpu.export(Net(), (torch.randn(2, 8),))
    program.save(tmp_path / "net")
    signature = json.loads((tmp_path / "net" / "signature.json").read_text())
    assert [i["name"] for i in signature["inputs"]] == [i.name for i in program.inputs]
    assert (tmp_path / "net" / "program.mlir").read_text() == program.text
    weights = torch.load(tmp_path / "net" / "weights.pt")
    assert weights.keys() == program.weights.keys()


def test_what_cannot_be_exported_is_named():
    class Bad(nn.Module):
        def forward(self, x):
            return torch.nonzero(x)

    with pytest.raises(GraphError, match=r"aten.nonzero"):
        stablehlo.export(Bad(), (torch.ones(3),))
    with pytest.raises(ValueError, match="'separate' or 'embedded'"):
        stablehlo.export(Net(), (torch.ones(2, 8),), weights="inside")


def test_there_is_no_bytecode():
    program = torch_tpu.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(NotImplementedError, match="stablehlo-translate --serialize"):
        _ = program.bytecode
