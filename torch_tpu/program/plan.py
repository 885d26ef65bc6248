"""What a program takes and gives, in the words the native core and the emitter share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_tpu.lowering import emit


@dataclass(frozen=True)
class StorageSpec:
    """A storage's base: logical row-major shape and dtype.

    ``padded``: sizes of the buffer in the dims where it is longer than what it holds, 0 in all
    others; None for a buffer that is just the base. ``token`` tells storages apart.
    """

    dims: tuple[int, ...]
    dtype: torch.dtype
    padded: tuple[int, ...] | None = None
    token: int = field(default=0, compare=False)
    can_pad: bool = field(default=True, compare=False)  # whether Plan.repads may name it

    @property
    def buffer_dims(self) -> tuple[int, ...]:
        """The shape of the buffer."""
        if self.padded is None:
            return self.dims
        return tuple(p or n for p, n in zip(self.padded, self.dims, strict=True))

    @property
    def numel(self) -> int:
        n = 1
        for d in self.dims:
            n *= d
        return n


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument: its place among the call's tensors, its storage and its view.

    For a 0-d CPU tensor (``view == views.SCALAR``) ``first`` counts into the ints or floats pack.
    """

    index: int
    storage: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    view: int
    first: int
    count: int
    wrapped: bool

    def meta(self) -> torch.Tensor:
        if self.wrapped:
            return emit.wrapped_number(self.dtype)
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class ScalarArg:
    """A Python number that travels as an operand: "int", "float", "bool" or "complex"."""

    kind: str
    slot: int
    value: int | float | bool | complex = 0  # for PyTorch's checks only, never for the program

    @property
    def dtype(self) -> torch.dtype:
        return {
            "int": torch.int64,
            "float": torch.float64,
            "bool": torch.bool,
            "complex": torch.complex128,
        }[self.kind]


@dataclass(frozen=True)
class Output:
    """One result of the executable: a new tensor (target -1) or the new base of a written one."""

    target: int
    donates: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    base_dtype: torch.dtype
    base: tuple[int, ...]
    padded: tuple[int, ...] | None = None  # as StorageSpec's


@dataclass(frozen=True)
class Return:
    kind: str  # "new", "argument", "none", "list"
    index: int = 0
    items: tuple[int, ...] = ()


@dataclass
class Plan:
    text: str = ""
    options: bytes = b""
    parameters: list[int] = field(default_factory=list)
    takes_ints: bool = False
    takes_floats: bool = False
    takes_rng: bool = False
    checks: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    resizes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    # Storages to pad first; then the call is described anew.
    repads: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    # Sizes that follow the call's own ints in their pack (torch_tpu/program/bounded).
    dynamic_sizes: list[int] = field(default_factory=list)
