"""TPU chips and slices: what is published about them, and the names people use for them.

Sources: Google Cloud's documentation pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)"
(cloud.google.com/tpu/docs) for peak FLOP/s, HBM bandwidth, interconnect bandwidth and slice shapes.
The HBM that a program may use is what libtpu's topology reports, which is a little less than the
chip has. The clock is not published; it follows from peak = MXUs x rows x columns x 2 x clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
    """One kind of TPU; every figure is for one *device*, as the compiler counts them.

    peak_bf16        FLOP/s of dense bfloat16 matmuls
    hbm_bytes        bytes that libtpu lets a program use
    hbm_bandwidth    bytes/s between HBM and the core
    ici_bandwidth    bytes/s that the interconnect moves in one direction, all links together
    clock            Hz of the core, which the compiler's cycle counts refer to
    vmem_tile        the (sublane, lane) tile of a 32-bit array
    devices_per_chip devices that share one chip
    slices           slice name's number -> topology in libtpu's spelling
    unit             what that number counts
    """

    name: str
    title: str
    peak_bf16: float
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    clock: float
    devices_per_chip: int
    rank: int
    unit: str
    slices: dict[int, str] = field(repr=False)
    aliases: tuple[str, ...] = ()
    vmem_tile: tuple[int, int] = (8, 128)


_SLICES_2D = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
_CUBES = {
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
    1024: "8x8x8",
    2048: "8x8x16",
    4096: "8x16x16",
    8192: "16x16x16",
}

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            title="TPU v5e",
            peak_bf16=197e12,
            hbm_bytes=16_909_336_064,
            hbm_bandwidth=819e9,
            ici_bandwidth=200e9,
            clock=1.5e9,
            devices_per_chip=1,
            rank=2,
            unit="chips",
            slices=_SLICES_2D,
            aliases=("v5litepod", "v5lite"),
        ),
        Chip(
            name="v5p",
            title="TPU v5p",
            peak_bf16=459e12,
            hbm_bytes=102_786_661_888,
            hbm_bandwidth=2765e9,
            ici_bandwidth=600e9,
            clock=1.75e9,
            devices_per_chip=1,
            rank=3,
            unit="TensorCores, two on a chip that is one device",
            slices={2: "1x1x1"} | _CUBES | {12288: "16x16x24"},
        ),
        Chip(
            name="v6e",
            title="TPU v6e (Trillium)",
            peak_bf16=918e12,
            hbm_bytes=33_546_042_880,
            hbm_bandwidth=1638e9,
            ici_bandwidth=400e9,
            clock=1.75e9,
            devices_per_chip=1,
            rank=2,
            unit="chips",
            slices=_SLICES_2D,
            aliases=("trillium",),
        ),
        Chip(
            name="tpu7x",
            title="TPU7x (Ironwood)",
            peak_bf16=2307e12 / 2,
            hbm_bytes=101_724_453_888,
            hbm_bandwidth=7380e9 / 2,
            ici_bandwidth=600e9 / 2,
            clock=2.2e9,
            devices_per_chip=2,
            rank=3,
            unit="devices, two on a chip",
            slices={2: "1x1x1"} | _CUBES,
            aliases=("ironwood", "v7x"),
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """A slice: ``name`` as the user said it, ``topology`` in libtpu's spelling."""

    name: str
    chip: Chip
    topology: str
    devices: int


def chip_of(name: str) -> Chip | None:
    """The chip of a name or alias ("v6e", "trillium"); None if there is none."""
    return next((c for c in CHIPS.values() if name == c.name or name in c.aliases), None)


def target_names() -> list[str]:
    """Every slice name: "v5e-1", "v6e-8", "tpu7x-64" …"""
    return [f"{chip.name}-{n}" for chip in CHIPS.values() for n in chip.slices]


def resolve(name: str | Target) -> Target:
    """The slice that a name stands for.

    "v6e-8" is a slice by Google Cloud's name, "v6e" the smallest one, "v6e:2x4" and "tpu7x:4x4x4"
    are topologies in chips. Raises ValueError, with the right names, for any other name.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise TypeError(f"target: got {name!r}; expected a name such as 'v6e-8'")
    text = name.strip().lower()
    if match := re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+)*))?", text):
        family, number, shape = match.groups()
        chip = chip_of(family)
        if chip is None:
            raise ValueError(
                f"target: no TPU {family!r} in {name!r}; expected one of {', '.join(CHIPS)}, "
                "such as 'v6e-8' or 'v6e:2x4'"
            )
        if number is not None:
            shape = chip.slices.get(int(number))
            if shape is None:
                sizes = ", ".join(f"{chip.name}-{n}" for n in chip.slices)
                raise ValueError(
                    f"target: no slice {name!r}; expected one of {sizes} (the number counts "
                    f"{chip.unit}), or a topology such as '{chip.name}:{_example(chip)}'"
                )
        elif shape is None:
            shape = next(iter(chip.slices.values()))
        dims = [int(d) for d in shape.split("x")]
        if len(dims) != chip.rank or 0 in dims:
            raise ValueError(
                f"target: topology {shape!r} in {name!r}; expected {chip.rank} positive "
                f"dimensions in chips, such as '{chip.name}:{_example(chip)}'"
            )
        chips = 1
        for d in dims:
            chips *= d
        return Target(name, chip, f"{chip.name}:{shape}", chips * chip.devices_per_chip)
    raise ValueError(
        f"target: got {name!r}; expected a slice such as {', '.join(_samples())}, or a topology "
        "such as 'v6e:2x4' or 'tpu7x:4x4x4'"
    )


def _example(chip: Chip) -> str:
    return list(chip.slices.values())[min(2, len(chip.slices) - 1)]


def _samples() -> list[str]:
    return [f"'{c.name}-{list(c.slices)[min(2, len(c.slices) - 1)]}'" for c in CHIPS.values()]
