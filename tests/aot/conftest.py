"""Markers and models that the tests of torch_tpu.aot share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import plugin

needs_libtpu = pytest.mark.skipif(
    plugin.libtpu_path() is None,
    reason="the TPU compiler, libtpu, is not installed (pip install 'torch-tpu[tpu]')",
)


class Block(nn.Module):
    """A transformer block of the plain kind."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGpt(nn.Module):
    def __init__(self, layers: int = 4, width: int = 32, heads: int = 2, words: int = 61) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if wanted is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
