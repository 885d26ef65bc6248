"""GPT-2 as minGPT writes it (124 M parameters: 12 layers, 12 heads, width 768).

python -m torch_tpu estimate examples/models/mingpt.py:train --target v6e-1
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import aot


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class MinGpt(nn.Module):
    """tokens (batch, length) -> logits, or with ``wanted`` the mean cross entropy."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        words: int = 50_257,
        room: int = 1024,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(room, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if wanted is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def train(batch: int = 8, seq: int = 1024) -> aot.Workload:
    with torch.device("meta"):
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        return aot.Workload(MinGpt(), (tokens, tokens), train=True, autocast=torch.bfloat16)


def infer(batch: int = 1, seq: int = 1024) -> aot.Workload:
    with torch.device("meta"):
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        return aot.Workload(MinGpt().bfloat16().eval(), (tokens,))
