"""Decompositions for tensors of the device where PyTorch's own give other numbers than its kernels.

PyTorch decomposes a few ops while it traces, on every device, above autograd. Ours stand beside
those, under the device's key.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["install"]


def multilabel_margin_loss_forward(
    input: Tensor, target: Tensor, reduction: int
) -> tuple[Tensor, Tensor]:
    """The loss, and 1 for the classes that are targets, in the shape of ``target``.

    PyTorch 2.13 counts the padding after the labels as labels of class 0.
    """
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    classes = rows.shape[1]
    is_label = (labels == -1).cumsum(1) == 0
    index = torch.where(is_label, labels, 0)
    hit = index.unsqueeze(2) == torch.arange(classes, device=target.device)
    is_target = (hit & is_label.unsqueeze(2)).any(1)
    margins = (1 - rows.gather(1, index).unsqueeze(2) + rows.unsqueeze(1)).relu()
    counted = is_label.unsqueeze(2) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / classes
    if reduction == 0:
        loss = losses if input.dim() == 2 else losses.reshape(())
    else:
        loss = losses.mean() if reduction == 1 else losses.sum()
    return loss, is_target.to(input.dtype).reshape(target.shape)


def install() -> None:
    overload = torch.ops.aten.multilabel_margin_loss_forward.default
    key = torch._C.DispatchKey.AutogradPrivateUse1
    if key not in overload.py_kernels:
        overload.py_impl(key)(multilabel_margin_loss_forward)
