"""Shapes, dtypes, strides and errors of results, found without PyTorch's Python references."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
import torch

from torch_tpu.lowering import meta

aten = torch.ops.aten


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """Meta tensors of several geometries that broadcast with each other."""

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    return [
        empty(2, 3, 4),
        empty(4, 3, 2).permute(2, 1, 0),
        empty(2, 3, 8)[:, :, ::2],
        empty(3, 1),
        empty(4).expand(3, 4),
        empty(),
    ]


def calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    floats = operands(torch.float32)
    for x in [*floats, *operands(torch.float64)]:
        yield aten.relu.default, (x,)
        yield aten.hardtanh.default, (x, 0.0, 6.0)
        yield aten.gelu.default, (x,)
        yield aten.mean.default, (x,)
        yield aten.ones_like.default, (x,)
        yield aten.full_like.default, (x, 2)
        if x.dim():
            shape = list(x.shape[-1:])
            for weight in (None, torch.empty(shape, dtype=x.dtype, device="meta")):
                matrix = torch.empty(5, *shape, dtype=x.dtype, device="meta")
                yield aten.linear.default, (x, matrix, None if weight is None else matrix[:, 0])
                yield aten.native_layer_norm.default, (x, shape, weight, weight, 1e-5)
            yield aten.sum.dim_IntList, (x, [-1], True)
            yield aten._softmax.default, (x, -1, False)
            yield aten._safe_softmax.default, (x, 0)
            yield aten.max.dim, (x, 0)
    image = torch.empty(2, 4, 3, 5, device="meta")
    channels = torch.empty(4, device="meta")
    for x in (image, image.to(memory_format=torch.channels_last), image[..., ::2]):
        for weight, mean in itertools.product((None, channels), repeat=2):
            yield aten.native_batch_norm.default, (x, weight, weight, mean, mean, True, 0.1, 1e-5)
    for x, y in itertools.product(floats, operands(torch.int64)):
        yield aten.logical_or.default, (x, y)
        yield aten.add.Tensor, (x, y)
        yield aten.lt.Tensor, (x, y)
    for x, number in itertools.product([*floats, *operands(torch.int64)], (True, 2, 2.5, 1j)):
        for op in (aten.add, aten.mul, aten.div, aten.sub):
            if op is not aten.sub or number is not True:
                yield op.Scalar, (x, number)
        yield aten.add.Scalar, (x, number, 2)
    conditions = operands(torch.bool)
    for c, x, y in itertools.product(conditions, floats[:3], operands(torch.float64)[2:]):
        yield aten.where.self, (c, x, y)


def described(results: Any) -> list[Any]:
    tensors = results if isinstance(results, (tuple, list)) else [results]
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def on_cpu(value: Any) -> Any:
    def zeros(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_()

    return torch.utils._pytree.tree_map_only(torch.Tensor, zeros, value)


def test_results_are_those_of_the_cpu() -> None:
    count = 0
    for overload, args in calls():
        expected = described(overload(*on_cpu(args)))
        assert described(meta.call_on_meta(overload, args, {})) == expected, (overload, args)
        count += 1
    assert count > 200


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (aten.add.Tensor, (torch.ones(2), torch.ones(3))),
        (aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3))),
        (aten.cat.default, ([torch.ones(2, 3), torch.ones(2, 4)],)),
        (aten.sum.dim_IntList, (torch.ones(2), [3])),
        (aten.floor.default, (torch.ones(2, dtype=torch.complex64),)),
    ],
)
def test_errors_are_those_of_the_cpu(overload: Any, args: tuple[Any, ...]) -> None:
    with pytest.raises(Exception) as cpu:
        overload(*args)
    metas = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
    with pytest.raises(cpu.type) as on_meta:
        meta.call_on_meta(overload, metas, {})
    assert str(on_meta.value) == str(cpu.value)


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_a_shape_function_that_stumbles_over_empty_meta_tensors(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, device="tpu")
    index = torch.zeros(0, dtype=torch.long, device="tpu")
    assert torch.index_add(x, 0, index, x).shape == shape
    assert x.index_add_(0, index, x).shape == shape


def test_a_refusal_of_the_cpu_is_no_fallback() -> None:
    x = torch.ones(2, dtype=torch.complex64, device="tpu")
    before = torch.tpu.stats()["fallbacks"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotImplementedError, match="floor is not supported for complex inputs"):
            torch.floor(x)
    assert torch.tpu.stats()["fallbacks"] == before


def test_common_ops_do_not_import_dynamo() -> None:
    code = """
        import sys, torch, torch_tpu
        from torch import nn
        x = torch.arange(12.0).view(3, 4).to("tpu")
        y = (x + x) * 2 - x / 3
        y = torch.where(y > 1, y.exp(), y.relu()).clamp(0, 1) @ x.T
        y = torch.cat([y, y]).softmax(-1).sum().item()
        block = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
        block.to("tpu")(x).pow(2).mean().item()
        linear = nn.Linear(4, 8).to("tpu")
        linear(x).sigmoid().sum().backward()
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.MaxPool2d(2))
        net.to("tpu")(torch.zeros(2, 3, 8, 8, device="tpu")).flatten(1).log_softmax(1).argmax(1)
        nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        nn.functional.cross_entropy(x, torch.tensor([0, 1, 2]).to("tpu")).item()
        print("torch._dynamo" in sys.modules)
    """
    run = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout.strip()) == (0, "False"), run.stderr
