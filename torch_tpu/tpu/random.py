"""Random state. Per device a seed and an offset; each op that draws moves the offset on by one.

Nothing here starts the runtime, so seeding is cheap, and safe in a forked DataLoader worker.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_tpu import _C

from .devices import Device, checked_index, device_count

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def default_generators() -> tuple[torch.Generator, ...]:
    """The default generator of every device (``torch.tpu.default_generators``)."""
    return tuple(_C.default_generator(i) for i in range(device_count()))


def _generator(device: Device) -> torch.Generator:
    return _C.default_generator(checked_index(device))


def get_rng_state(device: Device = "tpu") -> torch.Tensor:
    """The random state of ``device``: 16 bytes (uint8, on the CPU), seed then offset."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The random state of every device."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Device = "tpu") -> None:
    """Sets the random state of ``device`` to what :func:`get_rng_state` returned.

    Raises TypeError unless it is a uint8 tensor on the CPU, RuntimeError for a wrong size.
    """
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the random state of every device, in order."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seeds the current device's default generator. As ``torch.Generator.manual_seed``."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the default generators of all devices; ``torch.manual_seed`` does so too.

    Raises RuntimeError if ``seed`` is not in [-2**63, 2**64 - 1].
    """
    seed = int(seed)
    if not -(2**63) <= seed < 2**64:
        raise RuntimeError("Overflow when unpacking long long")
    _C.manual_seed_all(seed % 2**64)


def seed() -> None:
    """Seeds the current device's default generator with a number nobody can foretell."""
    _generator(None).seed()


def seed_all() -> None:
    """Seeds the default generators of all devices with one number nobody can foretell."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return _generator(None).initial_seed()
