"""fork: DataLoader workers stay on the CPU and work; a child that touches the device is told."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((2,), float(i * i)) + torch.zeros(2)


class TouchesTheDevice(Squares):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.ones(2, device="tpu")


@pytest.fixture
def started() -> None:
    torch.ones(4, device="tpu").sum().item()


@pytest.mark.parametrize("pin_memory", [False, True])
def test_workers_by_fork(started, pin_memory) -> None:
    loader = DataLoader(
        Squares(),
        batch_size=4,
        num_workers=2,
        pin_memory=pin_memory,
        multiprocessing_context="fork",
        timeout=60,
    )
    for _ in range(2):
        total = 0.0
        for batch in loader:
            assert batch.is_pinned() == pin_memory
            total += batch.to("tpu", non_blocking=True).sum().item()
        assert total == 2 * sum(i * i for i in range(8))


def test_workers_by_spawn() -> None:
    loader = DataLoader(
        Squares(), batch_size=8, num_workers=1, multiprocessing_context="spawn", timeout=120
    )
    (batch,) = list(loader)
    assert batch.to("tpu").sum().item() == 2 * sum(i * i for i in range(8))


def test_a_worker_that_touches_the_device_is_told(started) -> None:
    loader = DataLoader(
        TouchesTheDevice(), num_workers=1, multiprocessing_context="fork", timeout=60
    )
    with pytest.raises(RuntimeError, match="Cannot re-initialize tpu in forked subprocess"):
        next(iter(loader))


def in_child(work) -> str:
    """What `work` returns, or the error it raises, in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def test_what_a_forked_child_sees(started) -> None:
    x = torch.ones(2, device="tpu")
    assert in_child(torch.tpu._is_in_bad_fork) == "True"
    assert in_child(torch.tpu.is_initialized) == "False"
    assert in_child(lambda: torch.manual_seed(1) and torch.randn(2).shape) == "torch.Size([2])"
    for touch in (torch.tpu.init, lambda: torch.zeros(1, device="tpu"), lambda: x + 1, x.cpu):
        assert "Cannot re-initialize tpu in forked subprocess" in in_child(touch)
    assert (x + 1).tolist() == [2, 2]  # the parent goes on


def test_a_child_forked_before_the_start_may_use_the_device(run_python) -> None:
    code = """
        import os, torch, torch_tpu
        pid = os.fork()
        if pid == 0:
            ok = not torch.tpu._is_in_bad_fork() and torch.ones(2, device="tpu").sum().item() == 2
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
    """
    run_python(code)


def test_tensors_inherited_by_a_child_can_be_dropped(started) -> None:
    held = [torch.ones(4, device="tpu") for _ in range(3)]
    assert in_child(held.clear) == "None"
    assert all(x.sum().item() == 4 for x in held)
