"""``python -m torch_tpu selftest``: the device does what the CPU does, in each way of using it.

For the first person with a chip: what is checked here is the code that the tests check on XLA:CPU.
Ends in a table and a JSON file that can be sent along with a report.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """One check: "ok", "skipped" with the reason, or "FAILED" with the error."""

    name: str
    status: str
    seconds: float
    detail: str = ""
    trace: str = ""


class Skip(Exception):
    """A check that cannot be made here; the message says why."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest", help="compare the device with the CPU, in each mode (2 minutes)"
    )
    parser.add_argument("--output", default="torch_tpu_selftest.json", help="%(default)s")
    parser.add_argument("--only", help="names of checks, separated by commas")


def run(options: argparse.Namespace) -> int:
    """Exit code: 0 if nothing failed."""
    checks = dict(CHECKS)
    if options.only:
        names = options.only.split(",")
        unknown = [n for n in names if n not in checks]
        if unknown:
            print(f"selftest: no check {unknown[0]!r}; expected some of {', '.join(checks)}")
            return 2
        checks = {n: checks[n] for n in names}
    results = [_run(name, check) for name, check in checks.items()]
    report = {"facts": facts(), "results": [asdict(r) for r in results]}
    Path(options.output).write_text(json.dumps(report, indent=2) + "\n")
    show(report, options.output)
    return 1 if any(r.status == "FAILED" for r in results) else 0


def _run(name: str, check: Callable[[], str]) -> Result:
    start = time.perf_counter()
    try:
        status, detail, trace = "ok", check(), ""
    except Skip as reason:
        status, detail, trace = "skipped", str(reason), ""
    except Exception as error:  # whatever it is, the other checks go on
        first = (str(error).strip().splitlines() or [""])[0]
        status, detail, trace = "FAILED", f"{type(error).__name__}: {first}", traceback.format_exc()
    return Result(name, status, round(time.perf_counter() - start, 2), detail, trace)


def facts() -> dict[str, Any]:
    import torch

    from torch_tpu import _C
    from torch_tpu.version import __version__

    info = dict(_C.plugin_info())
    return {
        "torch_tpu": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plugin": {k: v for k, v in info.items() if isinstance(v, (str, int, list, tuple))},
        "devices": torch.tpu.device_count(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def show(report: dict[str, Any], path: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "result", "s", "detail")
    colour = {"ok": "green", "skipped": "yellow", "FAILED": "bold red"}
    for r in report["results"]:
        status = f"[{colour[r['status']]}]{r['status']}[/]"
        table.add_row(r["name"], status, f"{r['seconds']:.1f}", r["detail"].replace("[", "\\["))
    console = Console(highlight=False)
    kind = report["facts"]["plugin"].get("kind", "?")
    console.print(table)
    console.print(f"plug-in: {kind}; {report['facts']['devices']} device(s). Details in {path}")


# -- checks -------------------------------------------------------------------------------------


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 8),
    )


def _train(device: str, steps: int = 8, compiled: bool = False) -> list[float]:
    """Losses of a short training run from the same weights and data everywhere."""
    import torch

    model = _model().to(device)
    call = torch.compile(model, backend="tpu") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator).to(device)
        y = torch.randint(8, (16,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def _same_losses(losses: list[float]) -> str:
    import torch

    expected = _train("cpu")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-3, atol=2e-3)
    worst = max(abs(a - e) for a, e in zip(losses, expected, strict=True))
    return f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, off by {worst:.1e}"


def _mode(name: str) -> Callable[[], str]:
    def check() -> str:
        import torch

        from torch_tpu.tpu.numerics import Precision, precision

        mode = getattr(torch.tpu.EagerMode, name)
        with torch.tpu.set_eager_mode(mode), precision(Precision.HIGHEST):
            return _same_losses(_train("tpu"))

    return check


def compiled() -> str:
    import torch

    from torch_tpu.tpu.numerics import Precision, precision

    try:
        known = "tpu" in torch._dynamo.list_backends(exclude_tags=())
    except Exception:
        known = False
    if not known:
        raise Skip("this build has no torch.compile backend 'tpu'")
    with precision(Precision.HIGHEST):
        return _same_losses(_train("tpu", compiled=True))


def random_numbers() -> str:
    import torch

    torch.tpu.manual_seed(3)
    first = torch.randn(4096, device="tpu")
    torch.tpu.manual_seed(3)
    again = torch.randn(4096, device="tpu")
    other = torch.randn(4096, device="tpu")
    assert torch.equal(first.cpu(), again.cpu()), "the same seed gives other numbers"
    assert not torch.equal(again.cpu(), other.cpu()), "two draws are equal"
    mean, spread = first.mean().item(), first.std().item()
    assert abs(mean) < 0.06 and abs(spread - 1) < 0.05, f"mean {mean}, deviation {spread}"
    state = torch.tpu.get_rng_state()
    a = torch.rand(8, device="tpu").cpu()
    torch.tpu.set_rng_state(state)
    assert torch.equal(a, torch.rand(8, device="tpu").cpu()), "a restored state gives other numbers"
    return f"mean {mean:+.3f}, deviation {spread:.3f}"


def matmul_precision() -> str:
    import torch

    from torch_tpu.tpu.numerics import Precision, precision

    torch.manual_seed(0)
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    exact = x.double() @ y.double()
    size = exact.square().mean().sqrt()
    found = {}
    for mode in Precision:
        with precision(mode):
            got = (x.to("tpu") @ y.to("tpu")).cpu().double()
        found[mode] = ((got - exact).square().mean().sqrt() / size).item()
    limits = {Precision.DEFAULT: 2.0**-7, Precision.HIGH: 2.0**-14, Precision.HIGHEST: 2.0**-20}
    for mode, limit in limits.items():
        assert found[mode] < limit, f"{mode.name}: relative error {found[mode]:.1e} > {limit:.1e}"
    return ", ".join(f"{m.name} {e:.1e}" for m, e in found.items())


def transfers() -> str:
    import torch

    checked = 0
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int8,
        torch.bool,
    ):
        x = (torch.randn(33, 65) * 10).to(dtype)
        for form in (x, x.t(), x[::2, 1:], x[:0], x[0, 0]):
            assert torch.equal(form.to("tpu").cpu(), form), f"{dtype} {tuple(form.shape)}"
            checked += 1
    big = torch.randn(16, 2**20)
    start = time.perf_counter()
    back = big.to("tpu").cpu()
    seconds = time.perf_counter() - start
    assert torch.equal(back, big), "64 MiB there and back differ"
    return f"{checked} layouts; 64 MiB there and back at {2 * big.nbytes / seconds / 1e9:.1f} GB/s"


def several_devices() -> str:
    import torch

    count = torch.tpu.device_count()
    if count < 2:
        raise Skip("one device (TORCH_TPU_NUM_DEVICES=2 offers two of the CPU plug-in's)")
    x = torch.randn(64)
    for i in range(count):
        there = (x.to(f"tpu:{i}") * 2).to(f"tpu:{(i + 1) % count}")
        assert there.device.index == (i + 1) % count
        torch.testing.assert_close(there.cpu(), x * 2)
    return f"{count} devices, from each to the next"


def index_errors() -> str:
    import torch

    table = torch.randn(8, 4, device="tpu")
    try:
        table[torch.tensor([9], device="tpu")].cpu()
    except IndexError:
        return "an index out of range raises IndexError at the next synchronisation"
    raise AssertionError("an index out of range was not noticed")


def estimate_beside_measurement() -> str:
    """The compiler's estimate of a step beside its time on the chip."""
    import torch

    from torch_tpu import _C, aot, plugin

    if plugin.libtpu_path() is None:
        raise Skip("libtpu is not installed")
    kinds = _C.plugin_info().get("device_kinds", [])
    chips = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
    chip = next((name for kind, name in chips.items() if kinds and kinds[0] == kind), None)
    target = f"{chip or 'v6e'}:1x1" if chip not in ("v5p", "tpu7x") else f"{chip}:1x1x1"
    x = torch.randn(4096, 4096, dtype=torch.bfloat16)

    def step(a: Any) -> Any:
        for _ in range(4):
            a = torch.tanh(a @ a)
        return a

    mesh = {"fsdp": aot.resolve(target).devices}
    shard = (lambda name, shape: ()) if mesh["fsdp"] > 1 else None
    estimated = aot.compile(step, x, target=target, mesh=mesh, shard=shard).cost.core_seconds
    if chip is None:
        return f"4 matmuls of 4096: estimated {estimated * 1e3:.2f} ms on v6e; no chip to measure"
    a = x.to("tpu") / 64
    step(a).cpu()
    start = time.perf_counter()
    for _ in range(10):
        b = step(a)
    b.cpu()
    measured = (time.perf_counter() - start) / 10
    return f"estimated {estimated * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms"


CHECKS: list[tuple[str, Callable[[], str]]] = [
    ("transfers", transfers),
    ("strict", _mode("DEFER_NEVER")),
    ("debug", _mode("DEFER_NEVER_AND_LAUNCH_BLOCKING")),
    ("fused", _mode("DEFER_AND_FUSE")),
    ("compile", compiled),
    ("random", random_numbers),
    ("precision", matmul_precision),
    ("index errors", index_errors),
    ("devices", several_devices),
    ("estimate", estimate_beside_measurement),
]
