"""Lightning trains on one device through TpuStrategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import AcceleratorRegistry

from torch_tpu.integrations.lightning import TpuAccelerator, TpuStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.losses: list[float] = []
        self.seen: set[str] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        out = self.layer(x)
        self.seen.add(f"{x.device.type} {out.dtype}")
        loss = torch.nn.functional.mse_loss(out.float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, **options: Any) -> Model:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = Model()
    trainer = pl.Trainer(
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return model


def test_training_and_checkpoint(tmp_path: Path) -> None:
    want = train(tmp_path / "cpu", accelerator="cpu")
    got = train(tmp_path / "tpu", strategy=TpuStrategy())
    assert got.seen == {"tpu torch.float32"}
    assert got.losses == pytest.approx(want.losses, rel=1e-4)
    saved = next((tmp_path / "tpu").rglob("*.ckpt"))
    again = Model.load_from_checkpoint(saved, map_location="cpu")
    torch.testing.assert_close(again.layer.weight, want.layer.weight)


def test_bf16_mixed(tmp_path: Path) -> None:
    model = train(tmp_path, strategy=TpuStrategy(precision="bf16-mixed"))
    assert model.seen == {"tpu torch.bfloat16"}
    assert model.layer.weight.dtype == torch.float32 and model.losses[-1] < model.losses[0]


def test_registered() -> None:
    assert isinstance(AcceleratorRegistry.get("torch_tpu"), TpuAccelerator)
    count = torch.tpu.device_count()
    assert TpuAccelerator.parse_devices("auto") == list(range(count))
    with pytest.raises(MisconfigurationException, match="expected"):
        TpuAccelerator.parse_devices(count + 1)
    with pytest.raises(MisconfigurationException, match="precision"):
        TpuStrategy(precision="16-mixed")


def test_the_accelerator_alone_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="strategy=TpuStrategy"):
        train(tmp_path, accelerator=TpuAccelerator(), devices=1)
