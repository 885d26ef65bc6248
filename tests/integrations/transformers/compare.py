"""One tiny model on the device against the CPU: all float outputs and all gradients."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_tpu.program import fallback

from . import tiny

# Relative to the largest element of each output; of each gradient plus 1 % of the largest gradient
# of the model (a gradient that is a difference of large terms has no digits of its own).
OUTPUT_TOLERANCE = 2e-3
GRADIENT_TOLERANCE = 1e-2
# What is beyond that passes if it is no further from float64 than so many times the noise.
ALLOWED_NOISE = 3.0
# The other float64 runs that noise is judged by: how far weights and inputs move, and how often.
ROUNDING, REDRAWN = 3e-7, 4

Run = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


@dataclass
class Result:
    """status: ok, wrong, unbuilt (no tiny model, or the CPU does not run it), error."""

    type: str
    status: str
    detail: str = ""
    parameters: int = 0
    outputs: int = 0
    gradients: int = 0
    compiles: int = 0
    graphs: int = 0  # of Dynamo, and where it had to leave one
    breaks: int = 0
    fallbacks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def _float_outputs(out: Any) -> list[torch.Tensor]:
    if hasattr(out, "items"):
        out = {k: v for k, v in out.items() if "past_key" not in k and "cache" not in k}
    leaves = pytree.tree_leaves(out)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """A scalar to which every element counts differently."""
    terms = [
        (t.float().flatten() * torch.cos(torch.arange(t.numel(), device=t.device).float())).mean()
        for t in outputs
        if t.requires_grad and t.numel()
    ]
    return sum(terms) if terms else None


def run(model: torch.nn.Module, inputs: dict[str, Any], device: str, compiled: bool = False) -> Run:
    """Float outputs, and gradients by parameter name, both on the CPU."""
    model = model.to(device)
    model.zero_grad()
    torch.manual_seed(0)
    inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), inputs)
    call = torch.compile(model, backend="tpu") if compiled and device != "cpu" else model
    outputs = _float_outputs(call(**inputs))
    loss = _loss(outputs)
    if loss is not None:
        loss.backward()
    gradients = {
        name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None
    }
    return [t.detach().cpu() for t in outputs], gradients


def _exact(made: tiny.Tiny, draw: int | None = None) -> Run:
    """In float64 on the CPU; with ``draw``, of weights and inputs that are rounded otherwise.

    Odd draws are the opposite of the even ones before them, so that one of both crosses a kink.
    """
    model = copy.deepcopy(made.model).double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in made.inputs.items()}
    if draw is not None:
        generator = torch.Generator().manual_seed(draw // 2)
        size = -ROUNDING if draw % 2 else ROUNDING
        values = [*model.parameters(), *(v for v in inputs.values() if v.is_floating_point())]
        with torch.no_grad():
            for value in values:
                noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
                value.mul_(1 + size * noise)
    return run(model, inputs, "cpu")


def _no_digits(made: tiny.Tiny, expected: Run, actual: Run, found: list[str]) -> list[str]:
    """Of the differences ``found``, those that rounding does not explain.

    Where the CPU's own float32 result is as far from float64 as the device's, neither is right.
    Nor where float64 itself moves as far when weights and inputs move by a few units in the last
    place of float32: a ReLU whose argument is zero but for rounding has one of two gradients.
    """
    try:
        truth, *near = (_exact(made, draw) for draw in (None, *range(REDRAWN)))
    except Exception:  # a dtype written into the model
        return found
    kept = []
    places: list[tuple[str, Any]] = [
        *((f"output {i}", lambda r, i=i: r[0][i]) for i in range(len(truth[0]))),
        *((f"gradient of {n}", lambda r, n=n: r[1][n]) for n in truth[1]),
    ]
    for name, of in places:
        reason = next((f for f in found if f.startswith(f"{name}: ")), None)
        if reason is None:
            continue
        noise = max(_distance(of(truth), of(r), 0.0)[0] for r in (expected, *near))
        if not _distance(of(truth), of(actual), 0.0)[0] <= ALLOWED_NOISE * noise:
            kept.append(reason)
    return kept


def _distance(want: torch.Tensor, got: torch.Tensor, floor: float) -> tuple[float, float]:
    """Largest difference, and the scale it is measured by. Equal infinities and NaNs are equal."""
    if not want.numel():
        return 0.0, 1.0
    want, got = want.double(), got.double()
    finite = want.isfinite() & got.isfinite()
    same = (want == got) | (want.isnan() & got.isnan())
    if not bool((finite | same).all()):
        return float("inf"), 1.0
    difference = torch.where(finite, (want - got).abs(), 0.0).max().item()
    return difference, torch.where(finite, want.abs(), 0.0).max().item() + floor


def differences(
    expected: Run,
    actual: Run,
) -> list[str]:
    found = []
    if [(t.shape, t.dtype) for t in expected[0]] != [(t.shape, t.dtype) for t in actual[0]]:
        return ["output shapes or dtypes"]
    for i, (want, got) in enumerate(zip(expected[0], actual[0], strict=True)):
        difference, scale = _distance(want, got, 1e-3)
        if difference > OUTPUT_TOLERANCE * scale:
            found.append(f"output {i}: {difference:.2e} of {scale:.2e}")
    if set(expected[1]) != set(actual[1]):
        lost = sorted(set(expected[1]) ^ set(actual[1]))
        return [*found, f"{len(lost)} parameters with a gradient on one side only: {lost[:2]}"]
    largest = max((g.abs().max().item() for g in expected[1].values() if g.numel()), default=1.0)
    for name, want in expected[1].items():
        difference, scale = _distance(want, actual[1][name], 1e-2 * largest + 1e-7)
        if difference > GRADIENT_TOLERANCE * scale:
            found.append(f"gradient of {name}: {difference:.2e} of {scale:.2e}")
    return found


class _NoiseOfCpu(TorchDispatchMode):
    """Draws on the CPU what is drawn on the device, whose stream differs from the CPU's by design.

    Used for models that draw random numbers even in evaluation.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        there, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        drawn = func(*there, **kwargs)
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to("tpu"), drawn)


def check(model_type: str, compiled: bool = False) -> Result:
    """Build, run on both, compare. Never raises: what went wrong is in the result."""
    try:
        made = tiny.build(model_type)
    except tiny.Unbuilt as error:
        return Result(model_type, "unbuilt", str(error))
    result = Result(model_type, "ok", parameters=made.parameters)
    on_device = copy.deepcopy(made.model)
    try:
        expected = run(made.model, made.inputs, "cpu")
    except Exception:
        made.model.requires_grad_(False)
        on_device.requires_grad_(False)
        expected = run(made.model, made.inputs, "cpu")  # forward only, where the CPU has no more
    result.outputs, result.gradients = len(expected[0]), len(expected[1])
    if not expected[0]:
        return Result(model_type, "unbuilt", "no float outputs")
    # run() has seeded the CPU's generator with 0: another state means that the model drew numbers.
    drew = not torch.equal(
        torch.random.get_rng_state(), torch.Generator().manual_seed(0).get_state()
    )
    if compiled:  # its limit of recompiles counts for this type alone
        torch._dynamo.reset()
        counters.clear()
    before, announced = torch.tpu.stats(), set(fallback._announced)
    started = time.perf_counter()
    try:
        with _NoiseOfCpu() if drew else nullcontext():
            actual = run(on_device, made.inputs, "tpu", compiled)
        found = differences(expected, actual)
        if found and all(": " in f for f in found):
            found = _no_digits(made, expected, actual, found)
        if found:
            result.status, result.detail = "wrong", "; ".join(found[:3])
        if compiled:
            result.graphs = counters["stats"]["unique_graphs"]
            result.breaks = sum(counters["graph_break"].values())
            if not result.graphs:
                result.status, result.detail = "error", "nothing was compiled"
    except Exception as error:
        result.status, result.detail = "error", f"{type(error).__name__}: {str(error)[:300]}"
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            result.detail += f" @{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}"
            result.detail += f":{trace.tb_lineno}"
    result.seconds = round(time.perf_counter() - started, 1)
    after = torch.tpu.stats()
    result.compiles = after["compiles"] - before["compiles"]
    if after["fallbacks"] > before["fallbacks"]:
        result.fallbacks = sorted(fallback._announced - announced) or ["(announced earlier)"]
    return result
