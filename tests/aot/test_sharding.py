"""Meshes, rules and the annotations they become."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.aot.conftest import TinyGpt, needs_libtpu
from torch_tpu import aot
from torch_tpu.aot.capture import capture
from torch_tpu.aot.program import write
from torch_tpu.aot.sharding import Mesh


def tiles(annotation: str, shape: tuple[int, ...], devices: int) -> list[tuple[slice, ...]]:
    """The part of each device, by the definition of the notation."""
    if annotation == "{replicated}":
        return [tuple(slice(0, n) for n in shape)] * devices
    match = re.fullmatch(
        r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?\}",
        annotation,
    )
    assert match, annotation
    counts, sizes = ([int(x) for x in match[i].split(",")] for i in (1, 2))
    assert match[3] or len(sizes) == 1  # XLA's parser takes nothing else
    grid = np.arange(devices).reshape(sizes)
    if match[3]:
        grid = grid.transpose([int(x) for x in match[3].split(",")])
    grid = grid.reshape(counts)
    out: list[Any] = [None] * devices
    for place in itertools.product(*map(range, counts)):
        parts = place[: len(shape)]
        assert match[4] or len(place) == len(shape)
        out[grid[place]] = tuple(
            slice(p * (n // c), (p + 1) * (n // c))
            for p, n, c in zip(parts, shape, counts, strict=False)
        )
    return out


@pytest.mark.parametrize(
    "spec", [None, ("a",), (None, "b"), ("b", "a"), (("a", "b"), None), (("c", "a"), "b"), ("c",)]
)
def test_annotations_mean_what_the_spec_says(spec: Any) -> None:
    sizes = {"a": 2, "b": 3, "c": 4}
    mesh, shape = Mesh.of(sizes), (24, 12)
    parts = tiles(mesh.annotation(spec, shape), shape, mesh.size)
    for device, coordinates in enumerate(itertools.product(*map(range, sizes.values()))):
        where = dict(zip(sizes, coordinates, strict=True))
        for dim, n in enumerate(shape):
            axes = (*(spec or ()), None, None)[dim] or ()
            axes = (axes,) if isinstance(axes, str) else axes
            index, count = 0, 1
            for axis in axes:
                index, count = index * sizes[axis] + where[axis], count * sizes[axis]
            assert parts[device][dim] == slice(index * n // count, (index + 1) * n // count)
    local = mesh.local_shape(spec, shape)
    assert local == tuple(s.stop - s.start for s in parts[0])


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda m: m.annotation(("x",), (4,)), ValueError, "no axis 'x'.*one of .*'a'"),
        (lambda m: m.annotation(("a", "a"), (4, 4)), ValueError, "uses a mesh axis twice"),
        (lambda m: m.annotation(("a", "b"), (4,)), ValueError, "has 2 dims; the shape is"),
        (lambda m: Mesh.of({"a": 0}), ValueError, "expected a positive int"),
        (lambda m: Mesh.of(8), TypeError, "expected a mapping"),  # type: ignore[arg-type]
    ],
)
def test_errors(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call(Mesh.of({"a": 2, "b": 2}))


def test_customary_axes_may_be_absent() -> None:
    assert Mesh.of({"fsdp": 4}).annotation(("tensor", "fsdp"), (8, 8)) == "{devices=[1,4]<=[4]}"


def test_rules_reach_parameters_and_their_state() -> None:
    tokens = torch.zeros(8, 16, dtype=torch.long)
    captured = capture(TinyGpt(4), (tokens, tokens), train=True)
    rules = {"*.up.weight": ("tensor", "fsdp"), "embedding.weight": None}
    program = write(captured, Mesh.of({"fsdp": 4, "tensor": 2}), rules)
    assert program.partitions == 8
    found = dict(zip((i.name for i in captured.inputs), program.specs, strict=True))
    for name in ("blocks.*.up.weight", "exp_avg(blocks.*.up.weight)"):
        assert found[name] == (None, "tensor", "fsdp"), "the stacking dim is not divided"
    assert found["embedding.weight"] is None and found["exp_avg_sq(embedding.weight)"] is None
    assert found["args[0]"] == (("fsdp",),)
    by_function = write(
        captured,
        Mesh.of({"fsdp": 4, "tensor": 2}),
        lambda name, shape: ("fsdp",) if name == "head.weight" else None,
    )
    assert dict(zip(found, by_function.specs, strict=True))["head.weight"] == ("fsdp",)
    assert "mhlo.num_partitions = 8" in program.text
    assert program.notes == []
    (note,) = write(captured, Mesh.of({"fsdp": 7})).notes
    assert "copied to every device, since fsdp = 7 divides none" in note


def test_a_mesh_has_to_fill_the_target() -> None:
    with pytest.raises(ValueError, match="has 4 devices; v6e-8 has 8"):
        aot.compile(torch.sin, torch.zeros(8), target="v6e-8", mesh={"fsdp": 4})


def test_constrain_is_the_identity_outside() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    assert aot.constrain(x, "fsdp") is x


@needs_libtpu
@pytest.mark.tpu_compile
def test_a_sharded_training_step_divides_the_memory() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(1024, 1024, False), nn.Linear(1024, 1024, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = aot.constrain(self.one(x).relu(), ("data", "fsdp"))
            return self.two(x).square().mean()

    with torch.device("meta"):
        model, x = Net(), torch.zeros(256, 1024)
    program = aot.compile(model, x, target="v6e-4", train=True)
    assert program.partitions == 4 and program.mesh == {"fsdp": 4}
    memory = program.memory
    state = 3 * 2 * 1024 * 1024 * 4 / 4  # weights and two moments, float32, over 4 devices
    assert memory.arguments == pytest.approx(state + 256 * 1024, rel=0.01)
    assert memory.aliased == pytest.approx(state, rel=0.01), "state is updated in place"
    assert memory.by_role["parameter"] + memory.by_role["optimizer"] == pytest.approx(
        state, rel=0.01
    )
    assert memory.fits and program.cost.collectives()
    assert program.model_flops == pytest.approx(5 * 2 * 64 * 1024**2, rel=0.01)
