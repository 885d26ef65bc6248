"""64-bit integers, which a TPU has to emulate: no divisions in loops, no convolutions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_tpu
from torch_tpu.program import options

from .capture import captured_programs
from .compiler import TpuCompiler

pytestmark = pytest.mark.tpu_compile


def _draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-9, 9, shape, generator=generator)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "gcd": (torch.gcd, (_draw(5, 7), _draw(5, 1))),
    "lcm": (torch.lcm, (_draw(5, 7), _draw(5, 1))),
    "conv2d": (
        lambda x, w: torch.nn.functional.conv2d(x, w, stride=2, padding=1),
        (_draw(2, 3, 8, 8), _draw(4, 3, 3, 3)),
    ),
    "grouped conv1d": (
        lambda x, w: torch.nn.functional.conv1d(x, w, groups=2, dilation=2),
        (_draw(2, 4, 8), _draw(4, 2, 3)),
    ),
    "conv3d": (torch.nn.functional.conv3d, (_draw(1, 2, 5, 5, 5), _draw(3, 2, 3, 3, 3))),
    "conv_transpose2d": (
        lambda x, w: torch.nn.functional.conv_transpose2d(x, w, stride=2, output_padding=1),
        (_draw(2, 3, 5, 5), _draw(3, 4, 3, 3)),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_program_of_a_tpu(name: str) -> None:
    """It compiles, holds nothing that a TPU emulates at length, and its values are the CPU's."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    fn, arguments = CASES[name]
    on_device = [x.to("tpu") for x in arguments]
    with captured_programs() as programs:
        fn(*on_device)
    assert programs
    compiler = TpuCompiler()
    try:
        for program in programs:
            for slow in ("remainder", "divide", "convolution("):
                assert f"stablehlo.{slow}" not in program.text
            assert compiler.compile(program.text) is None
    finally:
        compiler.close()
    torch_tpu._C.clear_programs()
    with options.for_target("tpu"):
        got = fn(*on_device)
    assert torch.equal(got.cpu(), fn(*arguments))
    torch_tpu._C.clear_programs()
