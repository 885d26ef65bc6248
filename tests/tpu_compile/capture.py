"""The programs that running an op on the device asks for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.opinfo.compare import gradients, name_of, on_cpu, on_device, samples, tensors
from torch_tpu import _C
from torch_tpu.program import call, options
from torch_tpu.program.call import Plan

DTYPES = (
    torch.float32,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
)


@dataclass(frozen=True)
class Captured:
    """The ATen overload ("aten::add.Tensor") and the text of its program."""

    op: str
    text: str


@contextmanager
def captured_programs() -> Iterator[list[Captured]]:
    """Every distinct program that is planned inside, as a TPU would get it.

    Programs known from before are forgotten first. What runs is written for the device at hand.
    """
    found: dict[Captured, None] = {}
    result: list[Captured] = []
    compile_call = call.compile_call

    def record(name: str, *args: Any) -> Plan | None:
        with options.for_target("tpu"):
            plan = compile_call(name, *args)
        if plan is not None and plan.text:
            program = Captured(name, plan.text)
            if program not in found:
                found[program] = None
                result.append(program)
        return compile_call(name, *args)

    _C.clear_programs()
    call.compile_call = record
    try:
        yield result
    finally:
        call.compile_call = compile_call


def telling_sample(op: OpInfo) -> tuple[SampleInput, bool] | None:
    """A sample whose tensors are not trivial, in the first dtype that the op supports.

    The second value says whether gradients are defined; None if the op has no sample.
    """
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in supported), None)
    if dtype is None:
        return None
    best: tuple[SampleInput, bool] | None = None
    most = -2
    seen = 0
    for sample, differentiable in samples(op, dtype, 60):
        try:
            arguments = on_cpu(sample)
            op(arguments[0], *arguments[1], **arguments[2])
        except Exception:  # what the CPU refuses is no sample
            continue
        given = tensors(arguments)
        filled = all(t.numel() for t in given)
        rank = max((t.dim() for t in given), default=0) if filled else -1
        if rank > most:
            best, most = (sample, differentiable), rank
        seen += filled
        if seen == 6:
            break
    return best


def programs_of(op: OpInfo) -> list[Captured] | None:
    """The programs of one sample, forward and backward; None if there is no sample."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = telling_sample(op)
        if chosen is None:
            return None
        sample, differentiable = chosen
        arguments = on_device(name_of(op), sample)
        with captured_programs() as programs:
            result = op(arguments[0], *arguments[1], **arguments[2])
            if differentiable:
                try:
                    host = on_cpu(sample)
                    gradients(op, sample, host, op(host[0], *host[1], **host[2]))
                except Exception:  # what the CPU cannot differentiate the device need not
                    return programs
                gradients(op, sample, arguments, result)
    return programs
