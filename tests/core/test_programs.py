"""How often programs are compiled: numbers, offsets and random state are operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tpu  # noqa: F401


def compiles(fn: Callable[[], Any]) -> int:
    before = torch.tpu.stats()["compiles"]
    fn()
    return torch.tpu.stats()["compiles"] - before


def test_second_call_is_a_hit() -> None:
    x = torch.ones(7, 3, device="tpu")
    x + x
    before = torch.tpu.stats()
    x + x
    after = torch.tpu.stats()
    assert after["compiles"] == before["compiles"]
    assert after["hits"] == before["hits"] + 1


def test_changing_scalars_compile_once() -> None:
    x = torch.ones(11, device="tpu")
    x * 0.5 + 0.25
    assert compiles(lambda: [x * lr + lr for lr in (0.1, 0.2, 0.3, 7.5)]) == 0


def test_changing_alpha_and_value_compile_once() -> None:
    x = torch.ones(13, device="tpu")

    def step(a: float) -> None:
        torch.add(x, x, alpha=a)
        torch.addcmul(x, x, x, value=a)
        torch.full_like(x, a)
        x.clone().fill_(a)
        x.clamp(min=a)
        torch.lerp(x, x, a)

    step(1.5)
    assert compiles(lambda: [step(a) for a in (2.5, 3.5, -4.5)]) == 0


def test_row_loop_compiles_a_constant_number_of_programs() -> None:
    x = torch.arange(2560.0).view(256, 10).to("tpu")

    def loop(rows: int) -> torch.Tensor:
        acc = torch.zeros(10, device="tpu")
        for i in range(rows):
            acc = acc + x[i]
        return acc

    few = compiles(lambda: loop(4))
    assert few <= 4
    assert compiles(lambda: loop(256)) == 0
    assert torch.equal(loop(256).cpu(), x.cpu().sum(0))


def test_growing_slices_share_starts() -> None:
    x = torch.arange(100.0).to("tpu")
    x[3:10] + 1
    assert compiles(lambda: [x[i : i + 7] + 1 for i in range(1, 50)]) == 0


def test_random_ops_do_not_recompile_for_seed_or_offset() -> None:
    x = torch.empty(17, device="tpu")
    x.uniform_()
    x.normal_()

    def draw() -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            x.uniform_()
            x.normal_()

    assert compiles(draw) == 0


@pytest.mark.strict_mode
def test_data_dependent_sizes_do_not_recompile() -> None:
    x = torch.randn(64, device="tpu")

    def select(t: float) -> None:
        torch.nonzero(x > t)
        x[x > t]
        torch.masked_select(x, x > t)
        torch.unique((x * 3).round())

    select(0.0)
    assert compiles(lambda: [select(t) for t in (-1.0, -0.5, 0.5, 1.0)]) == 0


@pytest.mark.strict_mode
def test_an_optimizer_step_is_few_programs() -> None:
    """Foreach and fused forms: one program for the whole parameter list."""
    params = [torch.nn.Parameter(torch.randn(n, 4, device="tpu")) for n in (2, 3, 5, 8, 13)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    optimizer.step()
    before = torch.tpu.stats()
    optimizer.step()
    after = torch.tpu.stats()
    assert after["compiles"] == before["compiles"]
    assert after["executions"] - before["executions"] <= 2


def test_changing_learning_rate_does_not_recompile_the_optimizer() -> None:
    params = [torch.nn.Parameter(torch.randn(4, device="tpu")) for _ in range(3)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    optimizer.step()
    optimizer.step()

    def steps() -> None:
        for lr in (1e-2, 5e-3, 2e-3):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

    assert compiles(steps) == 0
