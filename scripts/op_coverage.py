"""Generate docs/op-coverage.md: how every ATen op runs on the device.

    python scripts/op_coverage.py                              # from the registry
    python scripts/op_coverage.py --compiled build/tpu_compile # and take over a full compile run

The registry says how an op runs; PyTorch's OpInfo which dtypes are tested; docs/op-coverage.json,
written from a run of `make test-tpu-compile`, whether its programs compile for a TPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._decomp import global_decomposition_table

import torch_tpu  # noqa: F401
from torch_tpu.eager import host_ops, kernels, nested, read_back, sparse
from torch_tpu.lowering.variants import functional_variant, written_arguments

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "op-coverage.md"
COMPILED = ROOT / "docs" / "op-coverage.json"

LOWERING = "own lowering"
NATIVE = "native core"
VIEW = "view"
HOST = "padded program"
COMPOSITE = "composite"
DECOMPOSITION = "decomposition"
FALLBACK = "CPU fallback"
ABSENT = "no CPU kernel"

KINDS = {
    LOWERING: "a function of `torch_tpu/lowering/ops` writes its program",
    NATIVE: "makes, aliases, resizes or copies storages in the native core",
    VIEW: "PyTorch's own metadata op; reading and writing through it is part of other programs",
    HOST: "read back once: sizes that are data (a padded program and its count), checks",
    COMPOSITE: "PyTorch's kernel calls other ops of this table",
    DECOMPOSITION: "PyTorch's decomposition, traced into one program",
    FALLBACK: "runs on the CPU, counted and announced",
}

_DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
}


@dataclass(frozen=True)
class Row:
    """One op: its name, how its overloads run, the usual way first, and the overloads."""

    name: str
    kinds: tuple[str, ...]
    overloads: tuple[str, ...]

    @property
    def cells(self) -> str:
        return f"| `{self.name}` | {', '.join(self.kinds)} |"


def has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def kind_of(qualified: str, overload: Any, registered: set[str]) -> str:
    """How one overload ("aten::add.Tensor") runs: one of KINDS, or ABSENT."""
    base, _, _ = qualified.partition(".")
    if qualified in registered:
        return LOWERING
    name = qualified.removeprefix("aten::")
    if name in host_ops.NAMES or name in read_back.NAMES or name in nested.DENSE_KERNELS:
        return HOST
    if name in sparse.CONVERSIONS or name in sparse.DENSE or name in nested.FROM_DENSE:
        return COMPOSITE
    if base in kernels.NATIVE or has_kernel(qualified, "PrivateUse1"):
        return VIEW if kernels.returns_view(overload) else NATIVE
    if kernels.returns_view(overload):
        return VIEW
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(has_kernel(qualified, key) for key in composite):
        return COMPOSITE
    if has_kernel(qualified, "CompositeExplicitAutogradNonFunctional"):
        return COMPOSITE
    candidates = [overload]
    if written_arguments(overload) and (variant := functional_variant(overload)) is not None:
        candidates.append(variant.functional)
    if any(o in global_decomposition_table["post_autograd"] for o in candidates):
        return DECOMPOSITION
    return FALLBACK if has_kernel(qualified, "CPU") else ABSENT


def registry_rows() -> list[Row]:
    """A row for every op of the ATen namespace that some kernel of PyTorch's CPU covers."""
    registered = set(kernels.plan_registrations())
    found: dict[str, list[tuple[bool, str, str]]] = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload_name = rest.partition(".")
        if namespace != "aten":
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, overload_name or "default", None)
        if overload is None or not _takes_tensors(overload):
            continue
        kind = kind_of(qualified, overload, registered)
        if kind != ABSENT:
            is_out = any(a.is_out for a in overload._schema.arguments)
            found.setdefault(name, []).append((is_out, kind, qualified))
    rows = []
    for name, entries in sorted(found.items()):
        # What most of the overloads without out= do comes first.
        weights: Counter[str] = Counter()
        for is_out, kind, _ in entries:
            weights[kind] += 1 if is_out else 100
        kinds = sorted(weights, key=lambda kind: (-weights[kind], list(KINDS).index(kind)))
        rows.append(Row(name, tuple(kinds), tuple(sorted(q for *_, q in entries))))
    return rows


def _takes_tensors(overload: Any) -> bool:
    """Operators of TorchScript on numbers, strings and lists are no ops of a device."""
    schema = overload._schema
    return any("Tensor" in str(a.type) for a in [*schema.arguments, *schema.returns])


def opinfo() -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
    """PyTorch's OpInfo entries and the pairs (entry, dtype) that tests/opinfo expects to fail."""
    sys.path.insert(0, str(ROOT))
    from tests.opinfo.compare import all_ops
    from tests.opinfo.exceptions import EXPECTED_FAILURES

    return all_ops(), EXPECTED_FAILURES


def tested_dtypes() -> dict[str, str]:
    """Op → the dtypes in which tests/opinfo compares it with the CPU."""
    entries, failures = opinfo()
    found: dict[str, set[torch.dtype]] = {}
    for entry, op in entries.items():
        for dtype in op.supported_dtypes("cpu"):
            if (entry, str(dtype).removeprefix("torch.")) not in failures:
                found.setdefault(op.aten_name, set()).add(dtype)
    return {
        name: " ".join(text for dtype, text in _DTYPES.items() if dtype in dtypes)
        for name, dtypes in found.items()
    }


def take_over(directory: Path) -> None:
    """Turn the notes of a full run of tests/tpu_compile into docs/op-coverage.json."""
    entries, _ = opinfo()
    overloads: dict[str, bool] = {}
    ops: dict[str, bool] = {}
    target = ""
    for path in sorted(directory.glob("*.json")):
        note = json.loads(path.read_text())
        target = note["target"]
        for name, compiles in note["ops"].items():
            overloads[name] = overloads.get(name, True) and compiles
        if note["ops"] and note["entry"] in entries:
            name = entries[note["entry"]].aten_name
            ops[name] = ops.get(name, True) and all(note["ops"].values())
    if not overloads:
        raise SystemExit(f"{directory}: no results; run `make test-tpu-compile` first")
    results = {
        "target": target,
        "overloads": dict(sorted(overloads.items())),
        "ops": dict(sorted(ops.items())),
    }
    COMPILED.write_text(json.dumps(results, indent=1) + "\n")


def render(rows: list[Row], dtypes: dict[str, str], compiled: dict[str, Any]) -> str:
    target = compiled.get("target", "v6e:1x1")
    results: dict[str, bool] = compiled.get("overloads", {})
    whole: dict[str, bool] = compiled.get("ops", {})
    counts = Counter(row.kinds[0] for row in rows)
    overloads = sum(len(row.overloads) for row in rows)
    asked = sum(results.values())
    lines = [
        "# Op coverage",
        "",
        "Generated by `scripts/op_coverage.py`; do not edit.",
        "",
        f"{len(rows)} ATen ops with {overloads} overloads. Left out: ops of which PyTorch has no "
        "CPU kernel either.",
        "",
        "| how it runs | ops | |",
        "|---|---:|---|",
        *(f"| {kind} | {counts[kind]} | {text} |" for kind, text in KINDS.items()),
        "",
        "*dtypes*: compared with the CPU by `tests/opinfo` (blank: no OpInfo entry of that name). "
        f"*{target}*: the programs of one sample of each OpInfo entry, forward and backward, "
        "compile with the real TPU compiler, ahead of time and without a chip (blank: no such "
        "program was needed); "
        f"{asked} of the {len(results)} overloads that ran do.",
        "",
        f"| op | how it runs | dtypes | {target} |",
        "|---|---|---|---|",
    ]
    for row in rows:
        outcomes = [results[o] for o in row.overloads if o in results]
        if not outcomes and row.name in whole:  # it runs as other ops
            outcomes = [whole[row.name]]
        mark = "" if not outcomes else "yes" if all(outcomes) else "no"
        lines.append(f"{row.cells} {dtypes.get(row.name, '')} | {mark} |")
    return "\n".join(lines) + "\n"


def registry_part(document: str) -> list[str]:
    """The first two cells of every op's row in a generated document."""
    return re.findall(r"^(\| `\w+` \| [^|]+ \|)", document, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="results of a full run")
    options = parser.parse_args()
    if options.compiled is not None:
        take_over(options.compiled)
    compiled = json.loads(COMPILED.read_text()) if COMPILED.is_file() else {}
    DOCUMENT.write_text(render(registry_rows(), tested_dtypes(), compiled))


if __name__ == "__main__":
    main()
