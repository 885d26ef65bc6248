"""Where the parts of a tensor live: a mesh of devices, and rules from names to dims.

A *spec* says for each dim of a tensor which mesh axes divide it: ``("fsdp", None)`` divides rows,
``(("fsdp", "tensor"), None)`` divides them over both axes, ``()`` or None replicates. Axes that a
spec leaves out hold copies. Written into programs as GSPMD annotations (``mhlo.sharding``).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Axes = str | Sequence[str] | None
SpecLike = Sequence[Axes] | None
Rules = Mapping[str, SpecLike] | Callable[[str, tuple[int, ...]], SpecLike]

# Axes along which the batch is divided, and along which parameters are, if nothing else is said.
BATCH_AXES = ("data", "replica", "fsdp")
PARAMETER_AXES = ("fsdp",)
# Rules may name these in a mesh without them: they divide nothing there.
CUSTOMARY_AXES = frozenset({*BATCH_AXES, "tensor", "sequence", "expert", "stage"})


@dataclass(frozen=True)
class Mesh:
    """Devices 0 … n-1 in row-major order of named axes: ``Mesh({"fsdp": 64, "tensor": 4})``."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(mesh: Mesh | Mapping[str, int]) -> Mesh:
        """Raises TypeError or ValueError for sizes that are no positive integers."""
        if isinstance(mesh, Mesh):
            return mesh
        if not isinstance(mesh, Mapping) or not mesh:
            raise TypeError(f"mesh: got {mesh!r}; expected a mapping such as {{'fsdp': 8}}")
        for name, size in mesh.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh: axis {name!r} has size {size!r}; expected a positive int")
        return Mesh(tuple(mesh.items()))

    @property
    def size(self) -> int:
        return math.prod(n for _, n in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def normalised(self, spec: SpecLike, shape: Sequence[int], what: str) -> list[tuple[str, ...]]:
        """Axes of each dim. Raises ValueError for a spec that fits neither shape nor mesh."""
        dims = [
            () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
            for axes in spec or ()
        ]
        if len(dims) > len(shape):
            raise ValueError(f"{what}: spec {spec!r} has {len(dims)} dims; the shape is {shape}")
        dims += [()] * (len(shape) - len(dims))
        dims = [
            tuple(a for a in axes if a in self.sizes or a not in CUSTOMARY_AXES) for axes in dims
        ]
        used = [axis for axes in dims for axis in axes]
        for axis in used:
            if axis not in self.sizes:
                raise ValueError(
                    f"{what}: no axis {axis!r} in the mesh; expected one of {list(self.sizes)}"
                )
        if len(used) != len(set(used)):
            raise ValueError(f"{what}: spec {spec!r} uses a mesh axis twice")
        return dims

    def annotation(self, spec: SpecLike, shape: Sequence[int], what: str = "sharding") -> str:
        """The text of ``mhlo.sharding`` for a tensor of this shape."""
        dims = self.normalised(spec, shape, what)
        tiles = [math.prod(self.sizes[a] for a in axes) for axes in dims]
        if all(t == 1 for t in tiles):
            return "{replicated}"
        order = list(self.sizes)
        used = [a for axes in dims for a in axes]
        rest = [a for a in order if a not in used]
        copies = math.prod(self.sizes[a] for a in rest)
        tiles += [copies] if copies > 1 else []
        devices = ",".join(map(str, tiles))
        permutation = [order.index(a) for a in used + rest]
        if permutation == sorted(permutation):
            # XLA reads several sizes with a transposition only, and drops what it cannot read.
            iota = f"[{self.size}]"
        else:
            sizes = ",".join(str(n) for _, n in self.axes)
            iota = f"[{sizes}]T({','.join(map(str, permutation))})"
        last = " last_tile_dim_replicate" if copies > 1 else ""
        return f"{{devices=[{devices}]<={iota}{last}}}"

    def local_shape(self, spec: SpecLike, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part, padded up."""
        dims = self.normalised(spec, shape, "sharding")
        return tuple(
            -(-n // math.prod(self.sizes[a] for a in axes))
            for n, axes in zip(shape, dims, strict=True)
        )

    def _present(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in axes if self.sizes.get(a, 1) > 1)

    def batch_spec(self, shape: Sequence[int]) -> SpecLike:
        """Dim 0 over the batch axes if their product divides it, else replicated."""
        axes = self._present(BATCH_AXES)
        count = math.prod(self.sizes[a] for a in axes)
        return (axes,) if axes and shape and shape[0] % count == 0 else None

    def parameter_spec(self, shape: Sequence[int], layers: int = 0) -> SpecLike:
        """The first dim that ``fsdp`` divides, after the stacking dim; small vectors replicated."""
        axes = self._present(PARAMETER_AXES)
        count = math.prod(self.sizes[a] for a in axes)
        first = 1 if layers else 0
        if not axes or len(shape) - first < 2:
            return None
        for d in range(first, len(shape)):
            if shape[d] % count == 0:
                return (*[None] * d, axes)
        return None


def matching(rules: Rules | None, name: str, shape: tuple[int, ...]) -> tuple[bool, SpecLike]:
    """(whether a rule speaks of this name, its spec); patterns are those of ``fnmatch``."""
    if rules is None:
        return False, None
    if callable(rules):
        spec = rules(name, shape)
        return spec is not None, spec
    for pattern, spec in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return True, spec
    return False, None


_library = torch.library.Library("torch_tpu_aot", "FRAGMENT")
_library.define("constrain(Tensor x, str spec) -> Tensor")


@torch.library.impl(_library, "constrain", "CompositeExplicitAutograd")
def _constrain(x: torch.Tensor, spec: str) -> torch.Tensor:
    return x.clone()


@torch.library.register_fake("torch_tpu_aot::constrain")
def _constrain_meta(x: torch.Tensor, spec: str) -> torch.Tensor:
    return torch.empty_like(x)


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, spec: str) -> torch.Tensor:
        ctx.spec = spec  # type: ignore[attr-defined]
        return torch.ops.torch_tpu_aot.constrain(x, spec)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.ops.torch_tpu_aot.constrain(grad, ctx.spec), None  # type: ignore[attr-defined]


def constrain(x: torch.Tensor, *spec: Axes) -> torch.Tensor:
    """``x``, divided over the mesh as ``spec`` says, and its gradient alike.

    Means something in a program compiled with ``mesh=`` that has these axes; elsewhere, and for
    axes that the mesh does not have, it is the identity.
    """
    from torch_tpu.aot.layers import capturing

    if not capturing():
        return x
    text = "/".join("" if a is None else a if isinstance(a, str) else "+".join(a) for a in spec)
    return _Constrain.apply(x, text)


def parse_spec(text: str, mesh: Mesh) -> list[tuple[str, ...]]:
    """The spec that :func:`constrain` wrote, without axes that the mesh does not have."""
    return [tuple(a for a in part.split("+") if a in mesh.sizes) for part in text.split("/")]
