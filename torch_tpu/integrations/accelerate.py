"""Accelerate 1.15: the device a process gets by default, memory for device maps, random state.

Accelerate lists device types in if-chains that end in the CPU. The functions below run Accelerate's
own first and add to what it returns where the answer was "no accelerator".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["HOOKS"]

_RANDOM_STATE = "torch_tpu_manual_seed"


def _present() -> bool:
    """Whether tensors can be put on the device, without starting it."""
    return torch.tpu.is_available()


def _state(module: ModuleType) -> None:
    """``Accelerator().device`` is ``tpu`` where Accelerate finds no accelerator that it knows."""
    original = module.PartialState.default_device.fget

    @functools.wraps(original)
    def default_device(self: Any) -> torch.device:
        device = original(self)
        return torch.device("tpu") if device.type == "cpu" and _present() else device

    module.PartialState.default_device = property(default_device)


def _modeling(module: ModuleType) -> None:
    """``device_map="auto"``: devices are numbered as CUDA's are, with the memory that is free."""
    original = module.get_max_memory

    @functools.wraps(original)
    def get_max_memory(max_memory: dict[int | str, Any] | None = None) -> dict[int | str, Any]:
        if not _present():
            return original(max_memory)
        if max_memory is None:
            found = original(None)
            if any(isinstance(key, int) or key == "mps" for key in found):
                return found
            free = {i: torch.tpu.mem_get_info(i)[0] for i in range(torch.tpu.device_count())}
            return {**free, **found}
        numbered = {key: size for key, size in max_memory.items() if isinstance(key, int)}
        if torch.cuda.is_available() or not numbered:
            return original(max_memory)
        # Accelerate counts devices of the types that it knows, and warns of all others.
        count = torch.tpu.device_count()
        for key in numbered:
            if not 0 <= key < count:
                module.logger.warning(
                    f"Device {key} is not available, available devices are {list(range(count))}"
                )
        rest = {key: size for key, size in max_memory.items() if key not in numbered}
        to_bytes = module.convert_file_size_to_int
        sizes = {k: to_bytes(v) if isinstance(v, str) else v for k, v in sorted(numbered.items())}
        return {**sizes, **original(rest)}

    module.get_max_memory = get_max_memory


def _memory(module: ModuleType) -> None:
    original = module.clear_device_cache

    @functools.wraps(original)
    def clear_device_cache(garbage_collection: bool = False) -> None:
        original(garbage_collection)
        if _present() and torch.tpu.is_initialized():
            torch.tpu.empty_cache()

    module.clear_device_cache = clear_device_cache


def _checkpointing(module: ModuleType) -> None:
    """The device's random state travels with a saved state, so that training resumes exactly."""
    save, load = module.save_accelerator_state, module.load_accelerator_state

    def states_file(folder: Any, index: int) -> Any:
        return module.Path(folder) / f"{module.RNG_STATE_NAME}_{index}.pkl"

    @functools.wraps(save)
    def save_accelerator_state(*args: Any, **kwargs: Any) -> Any:
        folder = save(*args, **kwargs)
        if torch.tpu.is_initialized():
            arguments = _bind(save, args, kwargs)
            path = states_file(folder, arguments["process_index"])
            states = module.load(path)
            states[_RANDOM_STATE] = torch.tpu.get_rng_state_all()
            torch.save(states, path)
        return folder

    @functools.wraps(load)
    def load_accelerator_state(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        arguments = _bind(load, args, kwargs)
        path = states_file(arguments["input_dir"], arguments["process_index"])
        if _present() and path.exists():
            states = module.load(path)
            if _RANDOM_STATE in states:
                torch.tpu.set_rng_state_all(states[_RANDOM_STATE])
        return result

    module.save_accelerator_state = save_accelerator_state
    module.load_accelerator_state = load_accelerator_state


def _bind(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    import inspect

    return inspect.signature(function).bind(*args, **kwargs).arguments


def _testing(module: ModuleType) -> None:
    """Accelerate's own tests (and PEFT's) run on the device where they would run on the CPU."""
    if module.torch_device == "cpu" and _present():
        module.torch_device = "tpu"
        module.device_count = torch.tpu.device_count()
        module.memory_allocated_func = torch.tpu.memory_allocated
        found = (module.torch_device, module.device_count, module.memory_allocated_func)
        module.get_backend = lambda: found


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.state": _state,
    "accelerate.utils.modeling": _modeling,
    "accelerate.utils.memory": _memory,
    "accelerate.checkpointing": _checkpointing,
    "accelerate.test_utils.testing": _testing,
}
