"""Names of slices."""

from __future__ import annotations

import pytest

from torch_tpu import aot
from torch_tpu.aot import chips


@pytest.mark.parametrize(
    "name, topology, devices",
    [
        ("v5e-8", "v5e:2x4", 8),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v6e-1", "v6e:1x1", 1),
        ("v6e", "v6e:1x1", 1),
        ("V6E-256", "v6e:16x16", 256),
        ("v5p-8", "v5p:2x2x1", 4),
        ("tpu7x-8", "tpu7x:2x2x1", 8),
        ("tpu7x-8192", "tpu7x:16x16x16", 8192),
        ("v6e:2x4", "v6e:2x4", 8),
        ("tpu7x:1x1x1", "tpu7x:1x1x1", 2),
        ("ironwood-64", "tpu7x:2x4x4", 64),
    ],
)
def test_names(name: str, topology: str, devices: int) -> None:
    target = aot.resolve(name)
    assert (target.name, target.topology, target.devices) == (name, topology, devices)


@pytest.mark.parametrize(
    "name, words",
    [
        ("v9-8", "expected one of v5e, v5p, v6e, tpu7x"),
        ("v6e-7", "v6e-8.*counts chips.*v6e:2x4"),
        ("tpu7x-4", "tpu7x-8.*two on a chip"),
        ("v6e:2x2x2", "expected 2 positive dimensions"),
        ("v6e:0x2", "expected 2 positive dimensions"),
        ("a TPU, please", "expected a slice such as"),
    ],
)
def test_wrong_names_list_the_right_ones(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        aot.resolve(name)


def test_every_name_resolves() -> None:
    names = aot.target_names()
    assert len(names) == len(set(names)) > 30
    for name in names:
        target = aot.resolve(name)
        number = int(name.rpartition("-")[2])
        expected = number // 2 if target.chip.name == "v5p" else number
        assert target.devices == expected, name


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda c: c.name)
def test_clock_follows_from_the_peak(chip: chips.Chip) -> None:
    """peak = multiply-adds a cycle x 2 x clock, for a whole number of 128 x 128 arrays."""
    arrays = chip.peak_bf16 / (2 * 128 * 128 * chip.clock)
    assert arrays == pytest.approx(round(arrays), rel=0.01)
