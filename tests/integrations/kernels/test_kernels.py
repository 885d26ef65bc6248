"""kernels: the device's backend is chosen, and a layer from a local repository takes over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("kernels", reason="kernels is not installed")

import torch
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from kernels.backends import _backend

METADATA = {
    "name": "doubled",
    "id": "_doubled_torch_tpu_test",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "tpu"},
}
SOURCE = """
import torch


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * torch.nn.functional.silu(x)


class layers:
    Doubled = Doubled
"""


def test_backend() -> None:
    assert _backend().name == "tpu"


def test_a_local_kernel_takes_over_on_the_device_only(tmp_path: Path) -> None:
    variant = tmp_path / "build" / "torch-tpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(SOURCE)
    (variant / "metadata.json").write_text(json.dumps(METADATA))

    @use_kernel_forward_from_hub("DoubledSilu")
    class Silu(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x)

    repository = LocalLayerRepository(tmp_path, layer_name="Doubled")
    x = torch.linspace(-2, 2, 7)
    plain = torch.nn.functional.silu(x)
    with use_kernel_mapping({"DoubledSilu": {"tpu": repository}}):
        on_tpu = kernelize(torch.nn.Sequential(Silu()), mode=Mode.INFERENCE, device="tpu")
        on_cpu = kernelize(torch.nn.Sequential(Silu()), mode=Mode.INFERENCE, device="cpu")
    torch.testing.assert_close(on_tpu(x.to("tpu")).cpu(), 2 * plain)
    torch.testing.assert_close(on_cpu(x), plain)
