"""The parts of SyncBatchNorm put together over two halves of a batch equal one batch norm."""

from __future__ import annotations

import torch
from torch.testing import assert_close

import torch_tpu  # noqa: F401


def test_two_halves_equal_the_whole() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    weight, bias = torch.rand(3) + 0.5, torch.randn(3)
    running_mean, running_var = torch.zeros(3), torch.ones(3)
    moved_mean, moved_var = running_mean.to("tpu"), running_var.to("tpu")

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.batch_norm(
        leaves[0], running_mean, running_var, leaves[1], leaves[2], True, 0.1, 1e-5
    )
    want_grads = torch.autograd.grad(want, leaves, grad)

    halves = [h.to("tpu") for h in x.split([2, 4])]
    grads = [g.to("tpu") for g in grad.split([2, 4])]
    w, c = weight.to("tpu"), bias.to("tpu")
    statistics = [torch.batch_norm_stats(h, 1e-5) for h in halves]
    counts = torch.tensor([8.0, 16.0], device="tpu")
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        halves[0],
        torch.stack([s[0] for s in statistics]),
        torch.stack([s[1] for s in statistics]),
        moved_mean,
        moved_var,
        0.1,
        1e-5,
        counts,
    )
    out = [torch.batch_norm_elemt(h, w, c, mean, invstd, 1e-5) for h in halves]
    assert_close(torch.cat(out).cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    assert_close(moved_mean.cpu(), running_mean, rtol=1e-4, atol=1e-5)
    assert_close(moved_var.cpu(), running_var, rtol=1e-4, atol=1e-5)

    reduced = [
        torch.batch_norm_backward_reduce(g, h, mean, invstd, w, True, True, True)
        for g, h in zip(grads, halves, strict=True)
    ]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (
        first + second for first, second in zip(*reduced, strict=True)
    )
    grad_x = [
        torch.batch_norm_backward_elemt(
            g, h, mean, invstd, w, sum_dy, sum_dy_xmu, counts.to(torch.int32)
        )
        for g, h in zip(grads, halves, strict=True)
    ]
    for got, expected in zip((torch.cat(grad_x), grad_weight, grad_bias), want_grads, strict=True):
        assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_absent_results_and_updates() -> None:
    x = torch.randn(2, 3, 4, device="tpu")
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    results = torch.batch_norm_backward_reduce(x, x, mean, invstd, None, False, False, True)
    assert [r is None for r in results] == [True, True, True, False]
    running_mean, running_var = torch.zeros(3, device="tpu"), torch.ones(3, device="tpu")
    saved, variance = torch.batch_norm_update_stats(x, running_mean, running_var, 0.5)
    host = x.cpu()
    assert_close(saved.cpu(), host.mean((0, 2)), rtol=1e-4, atol=1e-5)
    assert_close(variance.cpu(), host.var((0, 2), correction=0), rtol=1e-4, atol=1e-5)
    assert_close(running_mean.cpu(), host.mean((0, 2)) / 2, rtol=1e-4, atol=1e-5)
    assert_close(running_var.cpu(), 0.5 + host.var((0, 2)) / 2, rtol=1e-4, atol=1e-5)
