"""TPU chips in this machine, as the PCI bus shows them; nothing is loaded or opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# The vendor alone is not enough: network cards and disks of cloud machines carry it too.
GOOGLE_VENDOR = "0x1ae0"
TPU_DEVICE_IDS = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7",
}


def tpu_hardware(sys_root: Path = Path("/sys"), dev_root: Path = Path("/dev")) -> dict[str, Any]:
    """TPU chips on the PCI bus and the device nodes they are reached through."""
    chips = []
    for device in sorted((sys_root / "bus/pci/devices").glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = TPU_DEVICE_IDS.get((device / "device").read_text().strip())
        except OSError:
            continue
        if vendor == GOOGLE_VENDOR and kind:
            chips.append(kind)
    nodes = [*dev_root.glob("accel*"), *dev_root.glob("vfio/[0-9]*")]
    return {"chips": chips, "device_nodes": sorted(str(node) for node in nodes)}


def tpu_present() -> bool:
    """Whether this machine has a TPU chip that a driver has claimed."""
    found = tpu_hardware()
    return bool(found["chips"] and found["device_nodes"])


def tpu_devices() -> int:
    """How many devices the chips here make: v2, v3 and v7 chips have two, others one."""
    return sum(2 if kind in ("TPU v2 or v3", "TPU v7") else 1 for kind in tpu_hardware()["chips"])
