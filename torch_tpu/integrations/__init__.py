"""What released libraries lack to know the device, added when they are imported.

One module a library. Each only adds a row for ``tpu`` where the library lists devices; what the
library does for any other device stays as it is. Nothing here imports a library (``lightning.py``
does, and is imported by those who use it).
"""

from __future__ import annotations

from torch_tpu.import_hooks import after_import
from torch_tpu.integrations import accelerate, peft, safetensors

__all__ = ["install"]

_HOOKS = {**accelerate.HOOKS, **peft.HOOKS, **safetensors.HOOKS}


def install() -> None:
    """Wait for the libraries."""
    for module, callback in _HOOKS.items():
        after_import(module, callback)
