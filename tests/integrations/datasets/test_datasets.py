"""datasets: columns as tensors on the device, and batches through a pinned DataLoader."""

from __future__ import annotations

import pytest

pytest.importorskip("datasets", reason="datasets is not installed")

import torch
from datasets import Dataset
from torch.utils.data import DataLoader

ROWS = {"ids": [[i, i + 1, i + 2] for i in range(10)], "label": [i % 2 for i in range(10)]}


def test_format_with_the_device() -> None:
    row = Dataset.from_dict(ROWS).with_format("torch", device="tpu")[3]
    assert row["ids"].device.type == row["label"].device.type == "tpu"
    assert row["ids"].tolist() == [3, 4, 5] and row["label"].item() == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_pinned_batches(workers: int) -> None:
    """Rows stay on the host in the workers; the loader pins them, and they go over as they are."""
    rows = Dataset.from_dict(ROWS).with_format("torch")
    loader = DataLoader(
        rows,
        batch_size=4,
        pin_memory=True,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    seen = []
    for batch in loader:
        assert batch["ids"].is_pinned()
        there = batch["ids"].to("tpu", non_blocking=True)
        torch.testing.assert_close((there * 2).cpu(), batch["ids"] * 2)
        seen += there[:, 0].tolist()
    assert seen == list(range(10))


def test_map_may_compute_on_the_device() -> None:
    def norm(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"norm": torch.linalg.vector_norm(rows["ids"].float(), dim=1)}

    rows = Dataset.from_dict(ROWS).with_format("torch", device="tpu")
    done = rows.map(norm, batched=True, batch_size=5).with_format(None)
    want = torch.tensor(ROWS["ids"]).float().norm(dim=1).tolist()
    assert done["norm"][:] == pytest.approx(want, rel=1e-5)
