"""The three models that the training figures use, small enough for dispatch to show."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(width: int = 256, depth: int = 8) -> nn.Module:
    """`depth` times Linear, GELU, LayerNorm; input and output (batch, width)."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


def conv_net(classes: int = 10) -> nn.Module:
    """Two convolutions with batch norm and a linear head; input (batch, 3, 32, 32)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class Block(nn.Module):
    """Transformer block with attention written out: no backend's fused kernel decides a figure."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        head = width // self.heads
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2)) * head**-0.5
        weights = F.softmax(scores.masked_fill(future, float("-inf")), -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer that returns its own loss."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 256,
        heads: int = 4,
        layers: int = 4,
        context: int = 128,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, 0-d, for tokens and targets (batch, length), int64."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
