"""Generate torch_tpu/lowering/refused_dtypes.py: dtypes for which PyTorch's CPU has no kernel.

    python scripts/refused_dtypes.py

Runs the first sample of every entry of PyTorch's operator database in each dtype that the database
does not list for the CPU, and notes which ATen op refuses it there. Half precision that CUDA
computes is left out: models written for CUDA rely on it.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.opinfo.compare import all_ops, on_cpu, tensors  # noqa: E402
from tests.opinfo.refusals import DTYPES, cast_sample, refused_dtypes  # noqa: E402
from torch_tpu.lowering.refusals import base_name, dtypes_that_decide  # noqa: E402

TABLE = ROOT / "torch_tpu" / "lowering" / "refused_dtypes.py"

HEADER = '''"""Dtypes that PyTorch's CPU has no kernel for. Written by scripts/refused_dtypes.py."""

from __future__ import annotations

REFUSED_DTYPES: dict[str, str] = {
'''


# An overload and a dtype that decides.
Pair = tuple[Any, torch.dtype]


class _Noting(TorchDispatchMode):
    """Notes what the ops that ran had for dtypes, and the innermost one that raised."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: set[Pair] = set()
        self.refused: set[Pair] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtypes = [t.dtype for t in tensors((args, kwargs))]
        dtypes = dtypes or [v for v in kwargs.values() if isinstance(v, torch.dtype)]
        given = dtypes_that_decide(func, dtypes)
        pairs = {(func, dtype) for dtype in given}
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.refused |= pairs
            raise
        self.computed |= pairs
        return result


def run(op: Any, sample: Any) -> _Noting:
    first, args, kwargs = on_cpu(sample)
    mode = _Noting()
    with mode, warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        op(first, *args, **kwargs)
    return mode


def main() -> None:
    refused: set[Pair] = set()
    computed: set[Pair] = set()
    for op in all_ops().values():
        for dtype in DTYPES:
            if dtype in op.supported_dtypes("cpu"):
                for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=False), 4):
                    computed |= run(op, sample).computed
            if dtype not in refused_dtypes(op):
                continue
            sample = cast_sample(op, dtype)
            if sample is not None:
                noted = run(op, sample)
                computed |= noted.computed
                refused |= {pair for pair in noted.refused if pair[1] is dtype}
    table: dict[str, set[str]] = defaultdict(set)
    # Some refuse for another argument. Asking costs a run on the CPU: not for what is frequent.
    for overload, dtype in refused - {pair for pair in computed if pair[1].is_floating_point}:
        table[base_name(overload)].add(str(dtype).removeprefix("torch."))
    TABLE.write_text(HEADER + "".join(entry(n, table[n]) for n in sorted(table)) + "}\n")


def entry(name: str, dtypes: set[str]) -> str:
    line = f'    "{name}": "{" ".join(sorted(dtypes))}",\n'
    if len(line) > 101:
        line = line.replace(": ", ": (\n        ").replace('",\n', '"\n    ),\n')
    return line


if __name__ == "__main__":
    main()
