"""The device as TorchDynamo sees it.

PyTorch comes with a minimal interface named ``tpu`` (current device 0, no float64, no streams);
this one takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import device_interface as dynamo

from torch_tpu import tpu
from torch_tpu.tpu.devices import Device, device_index

__all__ = ["TpuInterface", "install"]


class TpuInterface(dynamo.DeviceInterface):
    """Calls of ``torch.tpu`` under the names Dynamo uses."""

    device = tpu.device
    Event = tpu.Event
    Stream = tpu.Stream

    class Worker:
        """Device facts for compile workers, recorded here and read there without a runtime."""

        @staticmethod
        def set_device(device: int) -> None:
            dynamo.caching_worker_current_devices["tpu"] = device

        @staticmethod
        def current_device() -> int:
            cached = dynamo.caching_worker_current_devices.get("tpu")
            return tpu.current_device() if cached is None else cached

        @staticmethod
        def get_device_properties(device: Device = None) -> Any:
            cache = dynamo.caching_worker_device_properties
            if "tpu" not in cache:
                cache["tpu"] = [tpu.get_device_properties(i) for i in range(tpu.device_count())]
            index = TpuInterface.Worker.current_device() if device is None else device_index(device)
            return cache["tpu"][index]

    current_device = staticmethod(tpu.current_device)
    set_device = staticmethod(tpu.set_device)
    exchange_device = staticmethod(tpu._exchange_device)
    maybe_exchange_device = staticmethod(tpu._maybe_exchange_device)
    device_count = staticmethod(tpu.device_count)
    is_available = staticmethod(tpu.is_available)
    stream = staticmethod(tpu.stream)
    current_stream = staticmethod(tpu.current_stream)
    set_stream = staticmethod(tpu.set_stream)
    _set_stream_by_id = staticmethod(tpu._set_stream_by_id)
    synchronize = staticmethod(tpu.synchronize)
    memory_allocated = staticmethod(tpu.memory_allocated)

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return tpu.current_stream(device_idx).stream_id

    @staticmethod
    def get_compute_capability(device: Device = None) -> str:
        return tpu.get_device_name(device)

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return tpu.is_bf16_supported(including_emulation)

    @classmethod
    def is_dtype_supported(cls, dtype: torch.dtype, including_emulation: bool = False) -> bool:
        return dtype in torch.accelerator.get_device_capability("tpu")["supported_dtypes"]


def install() -> None:
    """Makes Dynamo use this interface for ``tpu`` and every ``tpu:i``."""
    # Dynamo fills its table at first use and takes the class for "tpu" from this name.
    dynamo.TpuInterface = TpuInterface
    dynamo.register_interface_for_device("tpu", TpuInterface)
    for index in range(tpu.device_count()):
        dynamo.register_interface_for_device(f"tpu:{index}", TpuInterface)
