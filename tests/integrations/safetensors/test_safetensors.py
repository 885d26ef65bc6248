"""Safetensors files read straight to the device."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="safetensors is not installed")

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.ones(2, dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(5, dtype=torch.int64),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("device", ["tpu", "tpu:1", 0, torch.device("tpu", 1)])
def test_load_file(file: Path, device: object) -> None:
    got = load_file(file, device=device)
    place = torch.device("tpu", device) if isinstance(device, int) else torch.device(device)
    assert {t.device for t in got.values()} == {torch.device("tpu", place.index or 0)}
    torch.testing.assert_close({k: v.cpu() for k, v in got.items()}, TENSORS)


def test_safe_open(file: Path) -> None:
    with safe_open(file, framework="pt", device="tpu") as opened:
        assert isinstance(opened, safe_open)
        assert set(opened.keys()) == set(TENSORS) and opened.metadata() == {"format": "pt"}
        part = opened.get_slice("a")
        assert list(part.get_shape()) == [3, 4]
        row = part[1:, 2]
        assert row.device.type == opened.get_tensor("b").device.type == "tpu"
        assert row.tolist() == [6.0, 10.0]


def test_other_devices_get_the_librarys_own_file(file: Path) -> None:
    opened = safe_open(file, framework="pt")
    assert type(opened) is safe_open.__wrapped__ and isinstance(opened, safe_open)
    assert load_file(file)["a"].device.type == "cpu"
    with pytest.raises(Exception, match="invalid"):
        safe_open(file, framework="pt", device="nowhere")


def test_saving_from_the_device(tmp_path: Path) -> None:
    save_file({k: v.to("tpu") for k, v in TENSORS.items()}, tmp_path / "y.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "y.safetensors"), TENSORS)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]).to("tpu")
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "z.safetensors"))
    assert sum(k.endswith("weight") for k in load_file(tmp_path / "z.safetensors")) == 1


def test_loading_twice_compiles_nothing(file: Path) -> None:
    load_file(file, device="tpu")
    before = torch.tpu.stats()["compiles"]
    load_file(file, device="tpu")
    assert torch.tpu.stats()["compiles"] == before
