"""Every module of PyTorch's own database: forward, gradients and buffers against the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

import torch_tpu  # noqa: F401
from tests.conftest import SHARE

# Modules that draw random numbers: another stream gives other numbers.
RANDOM = ("Dropout", "RReLU", "FractionalMaxPool")


def move(value: Any, device: str) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(one, value)


def floats(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]


def run(
    module: Any, args: Any, kwargs: Any, parameters: list[torch.nn.Parameter] | None = None
) -> tuple[Any, list[Any]]:
    """The output, and the gradients of parameters and inputs of its sum."""
    out = module(*args, **kwargs)
    roots = floats(out)
    own = list(module.parameters()) if parameters is None else parameters
    leaves = [*own, *floats((args, kwargs))]
    leaves = [t for t in leaves if t.requires_grad]
    grads: list[Any] = []
    if roots and leaves:
        grads = list(
            torch.autograd.grad(
                roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True
            )
        )
    return out, grads


def check(
    info: ModuleInfo, training: bool, prepare: Callable[[torch.nn.Module], Any] = lambda m: m
) -> None:
    """``prepare`` makes of a module on the device what is called, such as its compiled form."""
    name = info.module_cls.__name__
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    for given in inputs:
        if given.forward_input is None:
            continue
        torch.manual_seed(0)
        arguments = given.constructor_input
        module = info.module_cls(*arguments.args, **arguments.kwargs)
        module.train(training)
        args, kwargs = given.forward_input.args, given.forward_input.kwargs
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            module(*move((args, kwargs), "cpu")[0])  # draws its parameters at the first call
        on_device = copy.deepcopy(module).to("tpu")
        try:
            expected, expected_grads = run(module, *move((args, kwargs), "cpu"))
        except RuntimeError:  # what the CPU refuses is no sample for the device
            continue
        parameters = list(on_device.parameters())
        actual, actual_grads = run(
            prepare(on_device), *move((args, kwargs), "tpu"), parameters=parameters
        )
        exact = not (training and any(r in name for r in RANDOM))
        pairs = [
            (expected, actual),
            (expected_grads, actual_grads),
            (list(module.buffers()), list(on_device.buffers())),
        ]
        for want_tree, got_tree in pairs:
            wants, gots = pytree.tree_leaves(want_tree), pytree.tree_leaves(got_tree)
            for want, got in zip(wants, gots, strict=True):
                if not isinstance(want, torch.Tensor):
                    continue
                assert got.device.type == "tpu"
                assert got.shape == want.shape and got.dtype == want.dtype
                if exact:
                    assert_close(
                        got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-4, equal_nan=True
                    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db[::SHARE], ids=lambda i: i.name)
def test_module(info: ModuleInfo, training: bool) -> None:
    if torch.float32 not in info.dtypes:
        pytest.skip("the module has no float32 form")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(info, training)
