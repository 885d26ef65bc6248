"""ResNet-50 (He et al., 2015) and a U-Net (Ronneberger et al., 2015).

python -m torch_tpu estimate examples/models/vision.py:resnet50_train --target v6e-1 --batch 64
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import aot


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if stride != 1 or inner != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nn.Module):
    """images (batch, 3, 224, 224) -> logits (batch, 1000), or with ``wanted`` the loss."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        stages, inner = [], 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(blocks):
                stages.append(Bottleneck(inner, width, stride if i == 0 else 1))
                inner = 4 * width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inner, classes)

    def forward(self, images: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        logits = self.head(self.stages(x).mean((2, 3)))
        return logits if wanted is None else F.cross_entropy(logits.float(), wanted)


def _double(inner: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """images (batch, 3, height, width) -> (batch, classes, height, width); sides in sixteens."""

    def __init__(
        self, classes: int = 2, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    ) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first = _double(3, widths[0])
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(_double(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(images)
        kept = []
        for down in self.down:
            kept.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        logits = self.head(x)
        return logits if wanted is None else F.cross_entropy(logits.float(), wanted)


def resnet50_train(batch: int = 64, size: int = 224) -> aot.Workload:
    with torch.device("meta"):
        images, wanted = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
        sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
        return aot.Workload(
            ResNet50(), (images, wanted), train=True, autocast=torch.bfloat16, optimizer=sgd
        )


def resnet50_infer(batch: int = 64, size: int = 224) -> aot.Workload:
    with torch.device("meta"):
        images = torch.zeros(batch, 3, size, size, dtype=torch.bfloat16)
        return aot.Workload(ResNet50().bfloat16().eval(), (images,))


def unet_train(batch: int = 8, size: int = 256) -> aot.Workload:
    with torch.device("meta"):
        images = torch.zeros(batch, 3, size, size)
        wanted = torch.zeros(batch, size, size, dtype=torch.long)
        return aot.Workload(UNet(), (images, wanted), train=True, autocast=torch.bfloat16)


def unet_infer(batch: int = 8, size: int = 256) -> aot.Workload:
    with torch.device("meta"):
        images = torch.zeros(batch, 3, size, size, dtype=torch.bfloat16)
        return aot.Workload(UNet().bfloat16().eval(), (images,))
