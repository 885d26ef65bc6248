"""The walk of CONTRIBUTING.md, "Add an op in ten minutes", performed on its own code block."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F

import torch_tpu  # noqa: F401
from torch_tpu import _C
from torch_tpu.lowering import registry

from .opinfo.compare import all_ops, check_sample, samples

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_the_guides_op_works_in_all_its_forms() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    code = "\n".join(line.removeprefix("   ") for line in code.splitlines())
    old = {n: registry._LOWERINGS.pop(n) for n in list(registry._LOWERINGS) if "softplus" in n}
    keep = {n: v for n, v in old.items() if "backward" in n}
    registry._LOWERINGS.update(keep)
    _C.clear_programs()
    try:
        exec(code, {"pointwise": registry.pointwise})
        assert registry.find(torch.ops.aten.softplus.default) is not None
        x = torch.linspace(-30, 30, 13)
        out = torch.empty(0, device="tpu")
        torch._C._nn.softplus(x.to("tpu"), out=out)
        torch.testing.assert_close(out.cpu(), F.softplus(x))
        half = F.softplus(x.to("tpu", torch.bfloat16), beta=2, threshold=3)
        torch.testing.assert_close(half.cpu(), F.softplus(x.bfloat16(), beta=2, threshold=3))
        op = all_ops()["nn.functional.softplus"]
        for sample, differentiable in samples(op, torch.float32, 10):
            check_sample(op, sample, differentiable)
    finally:
        registry._LOWERINGS.update(old)
        _C.clear_programs()
