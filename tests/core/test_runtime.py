"""Buffers, errors, threads and processes of the native core."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F

import torch_tpu  # noqa: F401


def live_buffers() -> int:
    gc.collect()
    torch.tpu.synchronize()
    return torch.tpu.memory_stats()["allocation.all.current"]


def train(steps: int) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    ).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(5, 8).to("tpu")
    y = torch.tensor([0, 1, 2, 3, 0]).to("tpu")
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_training_leaves_no_buffer_behind() -> None:
    train(2)
    before = live_buffers()
    allocated = torch.tpu.memory_allocated()
    train(5)
    assert live_buffers() == before
    assert torch.tpu.memory_allocated() == allocated


def test_in_place_updates_do_not_grow_memory() -> None:
    x = torch.zeros(1 << 16, device="tpu")
    x.add_(1)
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    start = torch.tpu.memory_allocated()
    for _ in range(10):
        x.add_(1)
    torch.tpu.synchronize()
    assert torch.tpu.max_memory_allocated() - start < x.nbytes
    assert x[0].item() == 11


@pytest.mark.not_debug
@pytest.mark.parametrize(
    "bad",
    [
        lambda i: torch.zeros(3, 2, device="tpu").index_select(0, i),
        lambda i: torch.zeros(3, 2, device="tpu")[i],
        lambda i: F.embedding(i, torch.zeros(3, 2, device="tpu")),
        lambda i: torch.zeros(3, 2, device="tpu").gather(0, i.view(1, 1)),
    ],
    ids=["index_select", "index", "embedding", "gather"],
)
def test_an_index_out_of_range_raises_at_the_next_synchronisation(bad) -> None:
    result = bad(torch.tensor([7]).to("tpu"))
    with pytest.raises(IndexError, match="index out of range"):
        result.cpu()
    torch.tpu.synchronize()  # reported once


def test_shape_and_dtype_errors_come_at_the_call() -> None:
    a, b = torch.ones(2, 3, device="tpu"), torch.ones(4, device="tpu")
    with pytest.raises(RuntimeError, match="must match the size"):
        a + b
    with pytest.raises(RuntimeError):
        a @ b
    with pytest.raises(IndexError, match="Dimension out of range"):
        a.sum(5)
    assert (a + a).sum().item() == 12


def test_tensors_on_two_devices_are_refused_in_cudas_words() -> None:
    a = torch.ones(2, device="tpu")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        a + torch.ones(2)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        a + torch.ones(2, device="tpu:1")
    assert (a + torch.tensor(1.0)).tolist() == [2, 2]  # a 0-d CPU tensor is a number


def test_an_op_without_a_program_follows_the_policy() -> None:
    from torch_tpu.program import fallback

    a = torch.randn(3, 3).to("tpu")
    before = torch.tpu.stats()["fallbacks"]
    with pytest.warns(UserWarning, match="runs on the CPU"):
        fallback._announced.clear()
        torch.linalg.eig(a)
    assert torch.tpu.stats()["fallbacks"] == before + 1


def test_threads_compute_at_once() -> None:
    results: dict[int, float] = {}

    def work(k: int) -> None:
        x = torch.full((32, 32), float(k), device="tpu")
        for _ in range(50):
            x = (x @ torch.eye(32, device="tpu")).relu() + 0.0
        results[k] = x.sum().item()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {k: 1024.0 * k for k in range(4)}


def test_copies_between_devices() -> None:
    x = torch.arange(6.0).view(2, 3)
    there = x.to("tpu:0").t().to("tpu:1")
    assert there.device.index == 1
    assert torch.equal(there.cpu(), x.t())
    assert torch.equal(there.to("tpu:0").cpu(), x.t())


def test_import_prints_nothing_and_loads_no_plugin() -> None:
    code = """
        import torch, torch_tpu, sys
        assert "jax" not in sys.modules
        assert not torch.tpu.is_initialized()
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.div(x, x, rounding_mode="bad"),
        lambda x: x + torch.ones(7, device=x.device),
        lambda x: x.view(5),
        lambda x: torch.cat([x, x[:, :1]], 0),
        lambda x: x.softmax(3),
        lambda x: F.conv2d(x, x),
        lambda x: torch.topk(x, 9),
        lambda x: x.to(torch.int64).mean(),
        lambda x: torch.linalg.cholesky(x),
        lambda x: F.nll_loss(x, x),
        lambda x: x.gather(0, torch.zeros(1, dtype=torch.int64, device=x.device)),
    ],
)
def test_errors_have_the_cpus_class_and_words(call) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(Exception) as on_cpu:
        call(x)
    with pytest.raises(on_cpu.type) as on_device:
        call(x.to("tpu"))
    assert str(on_device.value).splitlines()[0] == str(on_cpu.value).splitlines()[0]
