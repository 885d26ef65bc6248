"""DLRM (Naumov et al., 2019): embedded categories, dense features by an MLP, pairs of both.

Sizes as in the public configuration for Criteo Kaggle (26 tables, embedding width 16).

    python -m torch_tpu estimate examples/models/dlrm.py:train --target v6e-1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import aot

DENSE, TABLES, ROWS, WIDTH = 13, 26, 100_000, 16


def mlp(sizes: Sequence[int], last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if last or i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """dense (batch, 13), categories (batch, 26) -> logits (batch,), or with ``wanted`` the loss."""

    def __init__(self, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        self.bottom = mlp((DENSE, 512, 256, 64, width), last=True)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(TABLES))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = mlp((width + pairs, 512, 256, 1), last=False)
        first, second = torch.tril_indices(TABLES + 1, TABLES + 1, -1, device="cpu")
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)

    def forward(
        self, dense: torch.Tensor, categories: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.bottom(dense)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([x, *found], 1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.first, self.second]
        logits = self.top(torch.cat([x, pairs], 1)).squeeze(1)
        return logits if wanted is None else F.binary_cross_entropy_with_logits(logits, wanted)


def train(batch: int = 2048) -> aot.Workload:
    with torch.device("meta"):
        dense, wanted = torch.zeros(batch, DENSE), torch.zeros(batch)
        categories = torch.zeros(batch, TABLES, dtype=torch.long)
        sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        return aot.Workload(Dlrm(), (dense, categories, wanted), train=True, optimizer=sgd)


def infer(batch: int = 2048) -> aot.Workload:
    with torch.device("meta"):
        dense = torch.zeros(batch, DENSE)
        return aot.Workload(Dlrm().eval(), (dense, torch.zeros(batch, TABLES, dtype=torch.long)))
