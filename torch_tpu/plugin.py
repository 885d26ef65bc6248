"""Which PJRT plug-in drives the device, decided without loading it.

``TORCH_TPU_PJRT_PLUGIN`` (a path) wins; then libtpu where a TPU is present; then XLA's CPU plug-in.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from torch_tpu.hardware import tpu_devices, tpu_present

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginChoice:
    """path of the shared library, kind "cpu", "tpu" or "custom", devices to offer."""

    path: str
    kind: str
    num_devices: int
    reason: str


def _module_dir(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def libtpu_path() -> str | None:
    """The installed libtpu's shared library, or None."""
    override = os.environ.get("TPU_LIBRARY_PATH")
    if override:
        return override
    directory = _module_dir("libtpu")
    path = directory / "libtpu.so" if directory else None
    return str(path) if path is not None and path.is_file() else None


def cpu_plugin_path() -> str | None:
    """The shared library of the xla-cpu-pjrt wheel, or None."""
    directory = _module_dir("xla_plugins.xla_cpu_pjrt")
    path = directory / "xla_cpu_pjrt.so" if directory else None
    return str(path) if path is not None and path.is_file() else None


def requested_devices(default: int) -> int:
    """TORCH_TPU_NUM_DEVICES; ValueError if it is not a positive number."""
    text = os.environ.get("TORCH_TPU_NUM_DEVICES")
    if not text:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"TORCH_TPU_NUM_DEVICES: got {text!r}; expected a positive number")
    return int(text)


def choose() -> PluginChoice | None:
    """The plug-in to use; None if none is installed."""
    path = os.environ.get("TORCH_TPU_PJRT_PLUGIN")
    if path:
        choice = PluginChoice(path, "custom", requested_devices(1), "TORCH_TPU_PJRT_PLUGIN")
    elif tpu_present() and (tpu := libtpu_path()):
        # Counted without opening the chips: PyTorch's autograd asks for the number at any first
        # backward, and only a program that uses the device may take them.
        choice = PluginChoice(tpu, "tpu", requested_devices(tpu_devices()), "a TPU is present")
    elif cpu := cpu_plugin_path():
        choice = PluginChoice(cpu, "cpu", requested_devices(1), "no TPU: XLA's CPU plug-in")
    else:
        return None
    log.debug("PJRT plug-in %s (%s)", choice.path, choice.reason)
    return choice
