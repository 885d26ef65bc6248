"""``torch.tpu``: the device module, with the names ``torch.cuda`` has for the same things.

Besides its functions the module has properties:

* ``eager_mode``: the eager mode of the process, assignable (see :class:`EagerMode`);
* ``dynamic_shapes``: whether sizes that change get programs for all of them, assignable;
* ``allow_excess_precision``: whether XLA may keep wider intermediates, assignable;
* ``default_generators``: the default random generator of every device.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.program import options

from . import compiler as compiler
from . import devices, dynamic, memory, modes, numerics, random, streams
from . import optimizers as optimizers
from . import profiler as profiler
from .devices import *  # noqa: F403
from .devices import _exchange_device as _exchange_device
from .devices import _is_in_bad_fork as _is_in_bad_fork
from .devices import _lazy_init as _lazy_init
from .devices import _maybe_exchange_device as _maybe_exchange_device
from .dynamic import *  # noqa: F403
from .memory import *  # noqa: F403
from .modes import *  # noqa: F403
from .numerics import *  # noqa: F403
from .programs import _clear_cache as _clear_cache
from .programs import _get_cache_hits as _get_cache_hits
from .programs import _get_cache_misses as _get_cache_misses
from .programs import _get_cache_requests as _get_cache_requests
from .programs import _get_cache_stats as _get_cache_stats
from .random import *  # noqa: F403
from .streams import *  # noqa: F403
from .streams import _set_stream_by_id as _set_stream_by_id

__all__ = [
    *devices.__all__,
    *dynamic.__all__,
    *memory.__all__,
    *modes.__all__,
    *numerics.__all__,
    *random.__all__,
    *streams.__all__,
    "stats",
]


def stats() -> dict[str, Any]:
    """Counters of this process since its start.

    ``hits`` and ``misses`` count look-ups in the process. A program it misses is found in the
    host's cache directory (``disk_hits``) or at the remote root (``remote_hits``), or compiled
    (``compiles``; ``disk_misses`` of them were looked for on disk). ``*_seconds`` is time spent
    lowering, compiling, loading and storing. Further: executions, fallbacks, bytes moved.
    """
    return dict(_C.stats())


class _TpuModule(types.ModuleType):
    """A module with properties."""

    @property
    def eager_mode(self) -> modes.EagerMode:
        """The mode that holds for the calling thread; assigning sets the process's default."""
        return modes.get_eager_mode()

    @eager_mode.setter
    def eager_mode(self, mode: modes.EagerMode) -> None:
        modes.set_default_eager_mode(mode)

    @property
    def dynamic_shapes(self) -> bool:
        """Whether ops that meet many sizes get programs for all of them."""
        return options.dynamic_shapes()

    @dynamic_shapes.setter
    def dynamic_shapes(self, enabled: bool) -> None:
        options.exchange_dynamic_shapes(bool(enabled))

    @property
    def allow_excess_precision(self) -> bool:
        return numerics.get_allow_excess_precision()

    @allow_excess_precision.setter
    def allow_excess_precision(self, allow: bool) -> None:
        numerics.set_allow_excess_precision(allow)

    @property
    def _initialized(self) -> bool:
        """For torch.utils.checkpoint, which saves the random state of initialised devices only."""
        return devices.is_initialized()

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return random.default_generators()


sys.modules[__name__].__class__ = _TpuModule
