"""The names released libraries look for."""

from __future__ import annotations

import importlib

import pytest
import torch


def _names(text: str) -> list[str]:
    return text.split()


TPU_NAMES = _names(
    """
    is_available is_initialized device_count current_device set_device manual_seed
    manual_seed_all _is_in_bad_fork empty_cache synchronize Stream Event stream current_stream
    default_stream get_device_name get_device_properties memory_stats reset_peak_memory_stats
    max_memory_allocated mem_get_info memory_allocated memory_reserved get_rng_state
    set_rng_state memory device device_of set_stream StreamContext initial_seed seed seed_all
    get_rng_state_all set_rng_state_all default_generators max_memory_reserved memory_summary
    memory_snapshot reset_accumulated_memory_stats get_amp_supported_dtype is_bf16_supported
    get_device_capability can_device_access_peer init EagerMode eager_mode set_eager_mode
    Precision precision allow_excess_precision stats _lazy_init _get_cache_stats
    _get_cache_hits _get_cache_misses _get_cache_requests _clear_cache
    """
)

ACCELERATOR_NAMES = _names(
    """
    current_accelerator is_available device_count current_device_index set_device_index
    synchronize current_stream set_stream get_memory_info memory_allocated max_memory_allocated
    memory_reserved max_memory_reserved memory_stats reset_peak_memory_stats
    reset_accumulated_memory_stats empty_cache empty_host_cache get_device_capability
    """
)


@pytest.mark.parametrize("name", TPU_NAMES)
def test_torch_tpu_has(name: str) -> None:
    assert hasattr(torch.tpu, name)


def test_everything_in_all_exists() -> None:
    for name in torch.tpu.__all__:
        assert hasattr(torch.tpu, name), name


@pytest.mark.parametrize("name", ["_record_memory_history", "_snapshot"])
def test_memory_module_has(name: str) -> None:
    assert hasattr(torch.tpu.memory, name)


@pytest.mark.parametrize("name", ["memory", "random", "streams", "modes", "numerics", "devices"])
def test_submodules_are_loaded_once(name: str) -> None:
    assert importlib.import_module(f"torch.tpu.{name}") is getattr(torch.tpu, name)


@pytest.mark.parametrize(
    "name",
    [n for n in ACCELERATOR_NAMES if n not in ("set_device_index", "set_stream")],
)
def test_torch_accelerator_works(name: str) -> None:
    torch.ones(1, device="tpu")
    getattr(torch.accelerator, name)()


def test_torch_accelerator_figures_are_those_of_torch_tpu() -> None:
    x = torch.ones(1000, device="tpu")
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated() >= x.nbytes
    assert torch.accelerator.max_memory_allocated() == torch.tpu.max_memory_allocated()
    assert torch.accelerator.get_memory_info(0)[1] == torch.tpu.mem_get_info(0)[1]
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()


def test_accelerator_selects_and_waits() -> None:
    torch.accelerator.set_device_index(1)
    assert torch.tpu.current_device() == torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index("tpu:0")
    torch.accelerator.set_device_index(torch.device("tpu:0"))
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device="tpu").device == torch.device("tpu:1")
    assert torch.tpu.current_device() == 0
    torch.accelerator.synchronize("tpu:1")
    assert torch.accelerator.current_accelerator() == torch.device("tpu")


def test_device_module() -> None:
    assert torch.get_device_module("tpu") is torch.tpu
    assert torch.get_device_module(torch.device("tpu:0")) is torch.tpu
    assert torch.get_device_module() is torch.tpu
    assert torch._utils._get_available_device_type() == "tpu"


def test_backends_attribute() -> None:
    assert torch.backends.tpu.is_built()
    assert torch.backends.tpu.is_available()
    assert importlib.import_module("torch.backends.tpu") is torch.backends.tpu


def test_dispatch_key_has_a_public_name() -> None:
    library = torch.library.Library("torch_tpu_test_surface", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "TPU")
    x = torch.ones(2, device="tpu")
    assert torch.ops.torch_tpu_test_surface.twice(x).tolist() == [2, 2]


def test_stats_count() -> None:
    before = torch.tpu.stats()["executions"]
    (torch.ones(3, device="tpu") + 1).cpu()
    assert torch.tpu.stats()["executions"] > before
