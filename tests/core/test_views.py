"""Views, in-place writes and aliases against the CPU, by hand and by hypothesis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_tpu  # noqa: F401

Step = Callable[[torch.Tensor], torch.Tensor]


def both(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    cpu = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return cpu.clone(), cpu.to("tpu")


def same(device: torch.Tensor, cpu: torch.Tensor) -> None:
    assert device.shape == cpu.shape and device.stride() == cpu.stride()
    assert device.storage_offset() == cpu.storage_offset()
    torch.testing.assert_close(device.cpu(), cpu, rtol=0, atol=0)


@st.composite
def view_chain(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    """A shape and a list of view functions that are valid one after the other."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    probe = torch.empty(shape, device="meta")
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["slice", "select", "t", "unsqueeze", "expand", "flat"]))
        rank = probe.dim()
        step: Step
        if kind == "slice" and rank:
            d = draw(st.integers(0, rank - 1))
            n = probe.shape[d]
            lo = draw(st.integers(0, max(n - 1, 0)))
            hi = draw(st.integers(min(lo + 1, n), n))
            by = draw(st.integers(1, 3))
            index = (slice(None),) * d + (slice(lo, hi, by),)
            step = lambda x, i=index: x[i]  # noqa: E731
        elif kind == "select" and rank > 1:
            d = draw(st.integers(0, rank - 1))
            if probe.shape[d] == 0:
                continue
            k = draw(st.integers(0, probe.shape[d] - 1))
            step = lambda x, d=d, k=k: x.select(d, k)  # noqa: E731
        elif kind == "t" and rank > 1:
            order = draw(st.permutations(range(rank)))
            step = lambda x, o=tuple(order): x.permute(o)  # noqa: E731
        elif kind == "unsqueeze":
            d = draw(st.integers(0, rank))
            step = lambda x, d=d: x.unsqueeze(d)  # noqa: E731
        elif kind == "flat" and probe.is_contiguous():
            step = lambda x: x.view(-1)  # noqa: E731
        else:
            continue
        probe = step(probe)
        steps.append(step)
    return shape, steps


@settings(max_examples=60, deadline=None)
@given(view_chain())
def test_reading_through_any_view(case: tuple[tuple[int, ...], list[Step]]) -> None:
    cpu, device = both(case[0])
    for step in case[1]:
        cpu, device = step(cpu), step(device)
    same(device, cpu)
    torch.testing.assert_close((device + 1).cpu(), cpu + 1)


@settings(max_examples=60, deadline=None)
@given(view_chain(), st.sampled_from(["add_", "mul_", "fill_", "copy_", "zero_"]))
def test_writing_through_any_view(case: tuple[tuple[int, ...], list[Step]], write: str) -> None:
    base_cpu, base = both(case[0])
    alias = base.view(-1)
    cpu, device = base_cpu, base
    for step in case[1]:
        cpu, device = step(cpu), step(device)
    for x in (cpu, device):
        if write == "zero_":
            x.zero_()
        elif write == "copy_":
            x.copy_(torch.arange(float(x.numel())).view(x.shape).to(x.device) * -1)
        else:
            getattr(x, write)(3)
    same(device, cpu)
    same(base, base_cpu)
    torch.testing.assert_close(alias.cpu(), base_cpu.reshape(-1))


def test_steps_that_do_not_divide_a_row() -> None:
    cpu, device = both((4, 5))
    for index in ((slice(None), slice(1, None, 2)), (slice(1, None, 2), slice(None, None, 3))):
        same(device[index], cpu[index])
        device[index].mul_(2)
        cpu[index].mul_(2)
        same(device, cpu)


def test_overlapping_strides_read_but_refuse_writes() -> None:
    cpu, device = both((8,))
    args = ((3, 4), (2, 1))
    same(device.as_strided(*args), cpu.as_strided(*args))
    expanded = torch.zeros(1, device="tpu").expand(4)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        expanded.add_(1)


def test_out_of_storage_views_are_refused() -> None:
    x = torch.zeros(4, device="tpu")
    with pytest.raises(RuntimeError):
        x.as_strided((5,), (1,))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float64])
def test_dtype_views(dtype: torch.dtype) -> None:
    cpu = torch.randn(4, 6)
    device = cpu.to("tpu")
    same(device.view(dtype), cpu.view(dtype))
    for x in (cpu, device):
        x.view(dtype)[1:3].zero_()
    same(device, cpu)


def test_complex_views() -> None:
    cpu = torch.randn(3, 4, dtype=torch.complex64)
    device = cpu.to("tpu")
    same(torch.view_as_real(device), torch.view_as_real(cpu))
    for x in (cpu, device):
        torch.view_as_real(x)[..., 0].add_(1)
    same(device, cpu)
    real, on = torch.randn(5, 2), None
    on = real.to("tpu")
    same(torch.view_as_complex(on), torch.view_as_complex(real))


def test_a_clone_is_independent() -> None:
    cpu, device = both((3, 3))
    copy = device.clone()
    device.add_(1)
    same(copy, cpu)
    copy.mul_(5)
    same(device, cpu + 1)


def test_data_and_set() -> None:
    x = torch.zeros(4, device="tpu")
    view = x.view(2, 2)
    x.data = torch.ones(4, device="tpu")
    assert view.sum().item() == 0 and x.sum().item() == 4
    y = torch.empty(0, device="tpu")
    y.set_(x.untyped_storage(), 1, (2,), (1,))
    y.add_(1)
    assert x.tolist() == [1, 2, 2, 1]


def test_resize_keeps_contents_and_storage_can_be_freed() -> None:
    x = torch.arange(6.0).to("tpu")
    x.resize_(2, 4)
    assert x.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(32)
    x.fill_(2)
    assert x.sum().item() == 16


def test_out_takes_the_results_shape() -> None:
    a = torch.ones(2, 3, device="tpu")
    out = torch.empty(0, device="tpu")
    assert torch.add(a, a, out=out) is out
    assert out.shape == (2, 3) and out.sum().item() == 12
    target = torch.zeros(3, 2, device="tpu").t()
    torch.add(a, a, out=target)
    assert target.stride() == (1, 2) and target.sum().item() == 12
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(a, a, out=torch.empty(2, 3, dtype=torch.int64, device="tpu"))


def test_foreach_on_views_of_one_storage() -> None:
    flat = torch.zeros(10, device="tpu")
    parts = list(flat.split(3))
    torch._foreach_add_(parts, [1.0, 2.0, 3.0, 4.0])
    assert flat.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_channels_last() -> None:
    cpu = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    device = cpu.to("tpu")
    same(device, cpu)
    same(device * 2, cpu * 2)
    same(device[:, 1:], cpu[:, 1:])
    same(device.contiguous(), cpu.contiguous())
