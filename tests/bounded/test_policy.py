"""When programs for many sizes are made: what is evidence, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import MODE
from torch_tpu import _C
from torch_tpu.program import cache, recompiles
from torch_tpu.program.bounded import policy

from .padding import is_bounded


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    policy.clear()
    _C.clear_programs()
    with cache.disabled():
        yield
    policy.clear()


def compiles(call: Callable[[], object]) -> int:
    before = _C.stats()["compiles"]
    call()
    torch.tpu.synchronize()
    return int(_C.stats()["compiles"] - before)


@pytest.mark.strict_mode  # Fused mode compiles whole recordings
def test_a_growing_list_of_keys() -> None:
    """Attention over 96 lengths: programs for 5 buckets, not for 96 sizes."""
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 128, 32)

    def run(q: torch.Tensor, k: torch.Tensor) -> float:
        total = torch.zeros((), device=q.device)
        for i in range(1, 97):
            total = total + F.softmax(q @ k[:, :, :i].transpose(-1, -2), -1).square().sum()
        return total.item()

    on_device = q.to("tpu"), k.to("tpu")
    got: list[float] = []
    assert compiles(lambda: got.append(run(*on_device))) < 60
    assert compiles(lambda: got.append(run(*on_device))) == 0
    assert got[0] == pytest.approx(run(q, k), rel=1e-5)
    assert got[1] == got[0]


@pytest.mark.strict_mode
def test_a_cache_that_grows_by_concatenation() -> None:
    def grow(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        cache_of = torch.randn(1, 2, 3, 8).to(device)
        for _ in range(120):
            token = torch.randn(1, 2, 1, 8).to(device)
            cache_of = torch.cat([cache_of, token * cache_of.mean(2, keepdim=True)], 2)
        return cache_of.cpu()

    got: list[torch.Tensor] = []
    assert compiles(lambda: got.append(grow("tpu"))) < 40
    torch.testing.assert_close(got[0], grow("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.strict_mode
def test_prompts_of_many_lengths() -> None:
    """One weight that meets the third length is evidence."""
    table = torch.randn(100, 16).to("tpu")

    def run() -> None:
        for n in (137, 29, 412, 55, 41, 63, 300, 499, 301, 33, 60, 257):
            ids = torch.arange(n) % 100
            out = F.gelu(F.embedding(ids.to("tpu"), table)).sum(-1)
            expected = F.gelu(F.embedding(ids, table.cpu())).sum(-1)
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)

    # Two lengths of their own, then the buckets 512 and 64; three ops each.
    assert compiles(run) <= 3 * (2 + 2) + 3


WIDTHS = (100, 90, 80, 70, 60, 50, 44, 33, 20)


def test_the_layers_of_a_network_are_no_evidence() -> None:
    layers = torch.nn.Sequential(
        *(
            layer
            for a, c in pairwise(WIDTHS)
            for layer in (torch.nn.Linear(a, c), torch.nn.GELU(), torch.nn.LayerNorm(c))
        )
    ).to("tpu")
    recompiles.clear()
    for _ in range(2):
        out = torch.randn(8, WIDTHS[0]).to("tpu")
        for layer in layers:
            out = layer(out)
            assert not is_bounded(out)
        out.square().mean().backward()
    torch.tpu.synchronize()
    assert not [r for r in recompiles.reports() if "any size" in str(r.description)]


def test_two_batch_sizes_are_no_evidence() -> None:
    layer = torch.nn.Linear(8, 8).to("tpu")
    for n in (32, 17, 32, 17, 32, 17):
        assert not is_bounded(layer(torch.randn(n, 8).to("tpu")))


@pytest.mark.strict_mode
def test_mark_dynamic() -> None:
    x = torch.tpu.mark_dynamic(torch.randn(5, 8).to("tpu"), 0, max=100)
    assert _C.storage_base(x)[1] == [100, 0]
    y = x.exp().sum(1)
    assert is_bounded(y)

    def run() -> None:
        for n in (7, 44, 100):
            x = torch.randn(n, 8)
            a = torch.tpu.mark_dynamic(x.to("tpu"), 0, max=100)
            torch.testing.assert_close(a.exp().sum(1).cpu(), x.exp().sum(1))

    y.cpu()
    assert compiles(run) == 0


@pytest.mark.strict_mode
def test_settings_are_part_of_a_program_for_many_sizes() -> None:
    x = torch.tpu.mark_dynamic(torch.randn(5, 8).to("tpu"), 0, max=100)

    def run() -> None:
        x.exp().cpu()

    def run_with_options() -> None:
        with torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O1"}):
            run()

    assert compiles(run) == 1
    assert compiles(run_with_options) == 1
    assert compiles(run) == compiles(run_with_options) == 0


def test_mark_dynamic_refuses() -> None:
    x = torch.randn(4, 6).to("tpu")
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.tpu.mark_dynamic(x, 2)
    with pytest.raises(ValueError, match="expected 0 to 3"):
        torch.tpu.mark_dynamic(x, 0, max=3)
    with pytest.raises(ValueError, match="tpu device"):
        torch.tpu.mark_dynamic(torch.randn(3), 0)
    with pytest.raises(ValueError, match="without gaps"):
        torch.tpu.mark_dynamic(x[:, ::2], 0)
    assert not is_bounded(x)


def test_the_switch() -> None:
    weight = torch.randn(6, 8).to("tpu")
    with torch.tpu.set_dynamic_shapes(False):
        assert not torch.tpu.dynamic_shapes
        for n in (5, 6, 7, 9, 11):
            assert not is_bounded(torch.randn(n, 6).to("tpu") @ weight)
    assert torch.tpu.dynamic_shapes


@pytest.mark.skipif(MODE != "strict", reason="Fused mode reports whole recordings")
def test_the_report_tells() -> None:
    recompiles.clear()
    weight = torch.randn(6, 8).to("tpu")
    for n in (5, 6, 7):
        torch.randn(n, 6).to("tpu") @ weight
    text = "\n".join(str(r) for r in recompiles.reports())
    assert "any size from 2 on" in text
