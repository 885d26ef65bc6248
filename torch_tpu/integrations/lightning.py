"""Lightning 2.6: ``Trainer(strategy=TpuStrategy())`` trains on one device.

Lightning's own ``accelerator="tpu"`` means torch_xla and cannot be taken over; this registers
``torch_tpu`` beside it. Import this module where it is used: it imports Lightning.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

__all__ = ["TpuAccelerator", "TpuStrategy"]

NAME = "torch_tpu"


class TpuAccelerator(Accelerator):
    """The device as Lightning sees it. Used through :class:`TpuStrategy`."""

    def setup_device(self, device: torch.device) -> None:
        """MisconfigurationException if ``device`` is not a ``tpu``."""
        if device.type != "tpu":
            raise MisconfigurationException(
                f"TpuAccelerator: got device {device}; expected tpu. Lightning chooses the device "
                "of its single-device strategy itself: pass strategy=TpuStrategy()"
            )
        torch.tpu.set_device(device)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return torch.tpu.memory_stats(device)

    def teardown(self) -> None:
        torch.tpu.empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """``devices=`` of the Trainer as indices: a number, a list, or "auto" (all)."""
        count = torch.tpu.device_count()
        if isinstance(devices, str):
            if devices in ("auto", "-1"):
                return list(range(count))
            devices = [int(part) for part in devices.split(",")] if "," in devices else int(devices)
        chosen = (
            list(range(count if devices == -1 else devices))
            if isinstance(devices, int)
            else [*devices]
        )
        if not chosen or any(not 0 <= index < count for index in chosen):
            raise MisconfigurationException(f"devices: got {devices}; expected some of {count}")
        return chosen

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("tpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.tpu.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.tpu.is_available()

    @staticmethod
    def name() -> str:
        return NAME


class TpuStrategy(SingleDeviceStrategy):
    """One device, ``tpu:0`` unless named; ``precision`` is "32-true" or "bf16-mixed"."""

    strategy_name = NAME

    def __init__(
        self,
        device: torch.device | str | int = "tpu:0",
        precision: str = "32-true",
        **options: Any,
    ) -> None:
        if precision == "bf16-mixed":
            plugin: Precision = MixedPrecision("bf16-mixed", device="tpu")
        elif precision == "32-true":
            plugin = Precision()
        else:
            raise MisconfigurationException(
                f"TpuStrategy: got precision {precision!r}; expected '32-true' or 'bf16-mixed'"
            )
        device = torch.device("tpu", device) if isinstance(device, int) else torch.device(device)
        options.setdefault("accelerator", TpuAccelerator())
        super().__init__(device=device, precision_plugin=plugin, **options)


if NAME not in AcceleratorRegistry:
    AcceleratorRegistry.register(NAME, TpuAccelerator, description="TorchTPU's device")
    StrategyRegistry.register(NAME, TpuStrategy, description="one TorchTPU device")
