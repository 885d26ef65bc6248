"""Settings that must be made before torch is imported (which loads torch_tpu)."""

from __future__ import annotations

import os

# Two devices in one process, so that tests of copies and guards have somewhere to go.
os.environ.setdefault("TORCH_TPU_NUM_DEVICES", "2")
