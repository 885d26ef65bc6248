"""Devices: how many, which one is current, what it is, and waiting for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from torch_tpu import _C

__all__ = [
    "DeviceProperties",
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "set_device",
    "synchronize",
]

Device = torch.device | int | str | None


def device_index(device: Device = None) -> int:
    """The index ``device`` stands for; the current device's if it names none.

    Raises ValueError for a device of another kind. Does not check that there is such a device.
    """
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if not isinstance(device, torch.device):
        raise TypeError(
            f"expected a torch.device, an index or a string; got {type(device).__name__}"
        )
    if device.type != "tpu":
        raise ValueError(f"Expected a tpu device, but got: {device}")
    return _C.current_device() if device.index is None else device.index


def checked_index(device: Device = None) -> int:
    """As :func:`device_index`; raises RuntimeError if there is no such device."""
    index = device_index(device)
    _C.check_device_index(index)
    return index


def is_available() -> bool:
    """Whether there is a device to use. Does not start the runtime where that can be helped."""
    return _C.device_count() > 0


def device_count() -> int:
    """How many devices this process offers as ``tpu:0`` to ``tpu:n-1``; 0 if none can be used.

    On a TPU host those of the process, on the CPU plug-in 1 or what ``TORCH_TPU_NUM_DEVICES`` says.
    """
    return _C.device_count()


def is_initialized() -> bool:
    """Whether the runtime has been started. It starts at the first use of a device."""
    return _C.is_initialized() and not _C.in_bad_fork()


def init() -> None:
    """Starts the runtime: loads the PJRT plug-in and makes its client.

    Raises RuntimeError saying what to do if that fails, or in a child of ``fork`` whose parent has
    started it. Calling it again does nothing.
    """
    _C.init()


_lazy_init = init  # the name PyTorch calls before it makes the first tensor of a device


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had started the runtime."""
    return _C.in_bad_fork()


def current_device() -> int:
    """Index of the calling thread's current device."""
    return _C.current_device()


def set_device(device: Device) -> None:
    """Makes ``device`` the calling thread's current one; a negative index does nothing.

    Raises RuntimeError if there is no such device. Prefer ``with torch.tpu.device(i)``.
    """
    index = device_index(device)
    if index >= 0:
        _C.exchange_device(index)


def _exchange_device(index: int) -> int:
    """Makes a device current and returns the one before; -1 and nothing for a negative index."""
    return _C.exchange_device(index) if index >= 0 else -1


_maybe_exchange_device = _exchange_device


def synchronize(device: Device = None) -> None:
    """Waits until everything enqueued on ``device`` has finished.

    Raises what failed meanwhile: IndexError for an index out of range, RuntimeError for a failed
    program. Without a started runtime there is nothing to wait for.
    """
    _C.synchronize(device_index(device))


class device:
    """Context manager that changes the current device.

    Args:
        device: a device, an index or a string; None or a negative index changes nothing.
    """

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> device:
        self.prev_idx = _exchange_device(self.idx)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.idx = _maybe_exchange_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a tensor or storage current.

    An object that is not on a tpu device changes nothing.
    """

    def __init__(self, obj: Any) -> None:
        on_device = getattr(obj, "device", None)
        super().__init__(on_device if on_device is not None and on_device.type == "tpu" else None)


# PJRT's device kinds to the names the rest of the field uses.
_NAMES = {
    "TPU v4 lite": "TPU v4i",
    "TPU v5 lite": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU v7",
    "TPU v7x": "TPU v7",
}


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of a device.

    Attributes:
        name: see :func:`get_device_name`.
        total_memory: bytes of device memory; of the machine where the device is its processor.
        multi_processor_count: 1, a device is one core to PyTorch.
        major, minor: see :func:`get_device_capability`.
        kind, platform, description: PJRT's names for the device.
        local_hardware_id, process_index: PJRT's numbers for it.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    kind: str
    platform: str
    description: str
    local_hardware_id: int
    process_index: int


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Properties of ``device``. Starts the runtime; raises RuntimeError for no such device."""
    info = _C.device_info(checked_index(device))
    kind, platform = info["kind"], info["platform"]
    if kind.startswith("TPU"):
        name = _NAMES.get(kind, kind)
    else:
        name = f"TPU (emulated on XLA:{platform.upper()})"
    generation = re.match(r"TPU v(\d+)", name)
    return DeviceProperties(
        name=name,
        total_memory=info["total_memory"],
        multi_processor_count=1,
        major=int(generation[1]) if generation else 0,
        minor=0,
        kind=kind,
        platform=platform,
        description=info["description"],
        local_hardware_id=info["local_hardware_id"],
        process_index=info["process_index"],
    )


def get_device_name(device: Device = None) -> str:
    """Name of the device: "TPU v5e", "TPU v6e", "TPU v7" ... on TPUs.

    Elsewhere "TPU (emulated on XLA:CPU)", which starts like a TPU's name but names no generation:
    code that looks up peak FLOP/s by generation finds none, as it should.
    """
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Generation of the TPU as (major, minor), such as (6, 0); (0, 0) where there is no TPU."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether tensors go from one device to the other without a detour over the host.

    True between any two devices of the process. Raises ValueError if both are the same,
    RuntimeError if one does not exist.
    """
    here, peer = checked_index(device), checked_index(peer_device)
    if here == peer:
        raise ValueError(f"a device is no peer of itself; got tpu:{here} twice")
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes ``torch.autocast("tpu", dtype=...)`` takes; bfloat16 is the default."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 works on every plug-in, natively on TPUs, emulated on CPUs that lack it."""
    if including_emulation:
        return True
    return is_available() and get_device_properties().kind.startswith("TPU")
