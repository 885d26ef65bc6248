"""Every optimizer of PyTorch's own database over five steps against the CPU."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import torch_tpu  # noqa: F401

STEPS = 5


def train(
    model: torch.nn.Module, x: torch.Tensor, info: OptimizerInfo, options: dict, implementation: str
) -> list[float]:
    options = dict(options)
    if implementation != "default":
        options[implementation] = True
    optimizer = info.optim_cls(model.parameters(), **options)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        losses.append(optimizer.step(closure).item())
    return losses


def implementations(info: OptimizerInfo) -> list[str]:
    return ["default", *[i for i in ("foreach", "fused") if i in info.supported_impls]]


CASES = [(info, i) for info in optim_db for i in implementations(info)]


@pytest.mark.parametrize(
    "info,implementation", CASES, ids=[f"{i.optim_cls.__name__}-{k}" for i, k in CASES]
)
def test_optimizer(info: OptimizerInfo, implementation: str) -> None:
    torch.manual_seed(0)
    shapes = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    if info.optim_cls.__name__ == "Muon":
        shapes = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
    x = torch.randn(5, 4)
    if info.only_supports_sparse_grads:
        shapes, x = (
            torch.nn.Sequential(torch.nn.Embedding(6, 4, sparse=True)),
            torch.tensor([0, 3, 3]),
        )
    for case in info.optim_inputs_func(device="cpu"):
        options = dict(case.kwargs)
        if options.pop("differentiable", False):
            continue
        if isinstance(options.get("lr"), torch.Tensor) and implementation == "foreach":
            options["lr"] = options["lr"].item()  # PyTorch refuses a tensor there
        model = copy.deepcopy(shapes)
        on_device = copy.deepcopy(shapes).to("tpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = train(model, x, info, copy.deepcopy(options), implementation)
            got = train(on_device, x.to("tpu"), info, copy.deepcopy(options), implementation)
        torch.testing.assert_close(
            got, want, rtol=2e-4, atol=1e-6, msg=f"{case.desc}: {got} {want}"
        )
        for p, q in zip(model.parameters(), on_device.parameters(), strict=True):
            assert_close(q.detach().cpu(), p.detach(), rtol=1e-3, atol=1e-5)
