"""Accelerate's own test files that need no hub, on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.integrations import upstream

FILES = [
    "test_accelerator.py",
    "test_data_loader.py",
    "test_optimizer.py",
    "test_scheduler.py",
    "test_hooks.py",
    "test_modeling_utils.py",
    "test_memory_utils.py",
    "test_offload.py",
    "test_kwargs_handlers.py",
    "test_state_checkpointing.py",
]
KNOWN = [
    "test_accelerator_can_be_reinstantiated",  # asserts one of six device types by name
    "test_infer_auto_device_map_on_t0pp",  # reads a configuration from the Hub
    # float16 is refused for devices that are not in Accelerate's list
    "test_can_unwrap_model_fp16",
    "test_accelerated_optimizer_step_was_skipped",
    "test_autocast_kwargs",
    "test_grad_scaler_kwargs",
]


@pytest.mark.full
def test_its_own_tests(tmp_path: Path) -> None:
    source = upstream.source_of("accelerate", tmp_path)
    assert upstream.run(source, FILES, KNOWN) >= 100
