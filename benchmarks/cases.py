"""The benchmark cases on one device, in this process; benchmarks/run.py starts it once a backend.

    python benchmarks/cases.py --device tpu --mode strict --only add,gpt --json out.json

A figure is a median in microseconds unless its name ends in `_ms` (one cold call) or `_compiles`
(programs compiled by the whole case, on a device that counts them).
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from models import GPT, conv_net, mlp
from timing import median_us, once_ms
from torch import Tensor

MODES = {
    "strict": "DEFER_NEVER",
    "debug": "DEFER_NEVER_AND_LAUNCH_BLOCKING",
    "fused": "DEFER_AND_FUSE",
}


@dataclass
class Bench:
    """Where the cases run and the figures they leave."""

    device: str
    compiler: str  # backend of torch.compile
    figures: dict[str, float] = field(default_factory=dict)

    def sync(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def median(
        self,
        figure: str,
        call: Callable[[], object],
        count: int,
        repeats: int = 5,
        warm: int | None = None,
    ) -> None:
        self.figures[figure] = median_us(call, self.sync, count, repeats, warm)

    def first(self, figure: str, call: Callable[[], object]) -> None:
        self.figures[figure] = once_ms(call)

    def compiles(self) -> int | None:
        return int(torch.tpu.stats()["compiles"]) if self.device == "tpu" else None


Case = Callable[[Bench], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Registers a case under its name on the command line; its figures start with it too."""

    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


@case("add")
def add(bench: Bench) -> None:
    """Cost of one op: 16 elements are all overhead, a million are all memory."""
    for size in (16, 1024, 1 << 20):
        a, b = bench.put(torch.ones(size)), bench.put(torch.ones(size))
        bench.median(f"add_{size}", lambda a=a, b=b: a + b, 2000 if size < 100_000 else 100)


@case("chain")
def chain(bench: Bench) -> None:
    """41 dependent small ops, then the value on the host."""
    start = bench.put(torch.ones(16))

    def call() -> float:
        x = start
        for _ in range(20):
            x = x * 1.01 + 0.5
        return x.sum().item()

    bench.median("chain_41_small_ops", call, 50)


@case("lr")
def lr(bench: Bench) -> None:
    """A Python number that is new in every call: an operand, not a reason to compile."""
    a = bench.put(torch.ones(64))
    scalar = 0.0

    def call() -> Tensor:
        nonlocal scalar
        scalar += 1e-3
        return a * scalar + scalar

    bench.median("lr_changing_scalar_2_ops", call, 300)


@case("index")
def index(bench: Bench) -> None:
    """A Python loop over rows: 256 offsets, one program."""
    rows = bench.put(torch.arange(4096.0).view(256, 16))

    def call() -> float:
        total = torch.zeros(16, device=bench.device)
        for i in range(256):
            total = total + rows[i]
        return total.sum().item()

    bench.first("index_first_loop_256_rows_ms", call)
    bench.median("index_loop_256_rows", call, 2, 3, 1)


@case("growing")
def growing(bench: Bench) -> None:
    """Attention over 96 growing lengths, as in text generation with a cache."""
    q, k = bench.put(torch.randn(1, 4, 1, 32)), bench.put(torch.randn(1, 4, 128, 32))

    def call() -> float:
        total: Tensor | float = 0.0
        for length in range(1, 97):
            total = total + F.softmax(q @ k[:, :, :length].transpose(-1, -2), -1).sum()
        return float(total)

    bench.first("growing_first_96_shapes_ms", call)
    bench.median("growing_96_shapes", call, 1, 3, 1)


def train_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """One optimiser step on a fixed batch; returns the loss as a number."""

    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.item()

    return step


@case("mlp")
def mlp_training(bench: Bench) -> None:
    model = mlp().to(bench.device)
    x = bench.put(torch.randn(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = train_step(lambda: model(x).pow(2).mean(), optimizer)
    bench.first("mlp_first_step_ms", step)
    bench.median("mlp_train_step", step, 10, 5, 5)


@case("gpt")
def gpt_training(bench: Bench) -> None:
    model = GPT().to(bench.device)
    tokens = bench.put(torch.randint(0, 256, (4, 128)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = train_step(lambda: model(tokens, tokens), optimizer)
    bench.first("gpt_first_step_ms", step)
    bench.median("gpt_train_step", step, 3, 5, 3)


@case("cgpt")
def gpt_compiled(bench: Bench) -> None:
    """The same step with the model under torch.compile; the optimiser stays eager."""
    model = GPT().to(bench.device)
    tokens = bench.put(torch.randint(0, 256, (4, 128)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    compiled = torch.compile(model, backend=bench.compiler)
    step = train_step(lambda: compiled(tokens, tokens), optimizer)
    bench.first("cgpt_first_step_ms", step)
    bench.median("cgpt_train_step", step, 3, 5, 3)

    @torch.no_grad()
    def forward() -> Tensor:
        return compiled(tokens, tokens)

    bench.median("cgpt_forward", forward, 5, 5, 3)


@case("wgpt")
def gpt_whole_step(bench: Bench) -> None:
    """The same step, optimiser included, as one program."""
    if bench.device != "tpu":
        return
    model = GPT().to(bench.device)
    tokens = bench.put(torch.randint(0, 256, (4, 128)))
    trainer = torch.tpu.optimizers.SingleTraceTrainer(
        model, torch.tpu.optimizers.AdamW(1e-3, state_dtype=None)
    )

    def first() -> float:
        nonlocal step
        step = trainer.make_compiled_train_step((tokens, tokens))
        return step((tokens, tokens)).item()

    step: Callable[..., Tensor]
    bench.first("wgpt_first_step_ms", first)
    bench.median("wgpt_train_step", lambda: step((tokens, tokens)).item(), 3, 5, 3)


@case("conv")
def conv(bench: Bench) -> None:
    model = conv_net().to(bench.device)
    images, labels = bench.put(torch.randn(8, 3, 32, 32)), bench.put(torch.randint(0, 10, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = train_step(lambda: F.cross_entropy(model(images), labels), optimizer)
    bench.first("conv_first_step_ms", step)
    bench.median("conv_train_step", step, 3, 5, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmark cases on one device.")
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--mode", choices=MODES, help="eager mode of device tpu")
    parser.add_argument("--only", default="", help=f"comma-separated: {','.join(CASES)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for figures and errors")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(CASES)
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if options.device == "tpu":
        import torch_tpu  # noqa: F401

        if options.mode:
            torch.tpu.eager_mode = getattr(torch.tpu.EagerMode, MODES[options.mode])

    compiler = "tpu" if options.device == "tpu" else "inductor"
    bench = Bench(options.device, compiler)
    errors: dict[str, str] = {}
    for name in chosen:
        torch.manual_seed(0)
        before = bench.compiles()
        try:
            CASES[name](bench)
        except Exception as error:  # a case that fails is a result; the others still run
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            errors[name] = f"{type(error).__name__}: {first_line[:200]}"
        after = bench.compiles()
        if before is not None and after is not None and name not in errors:
            bench.figures[f"{name}_compiles"] = after - before
        print(f"  {name}", file=sys.stderr, flush=True)
    result = {"figures": bench.figures, "errors": errors}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    else:
        print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
