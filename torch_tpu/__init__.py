"""PyTorch on TPUs, and the same programs on any machine.

Importing this module makes the device ``tpu`` known to PyTorch. It loads no plug-in and prints
nothing; CPU and CUDA users in the same process notice no difference.
"""

from __future__ import annotations

import atexit
import time


def _autoload() -> None:
    """Entry point of ``torch.backends``: ``import torch`` calls it when torch comes first.

    Importing this module has done the work. It stands above ``import torch``, which looks for it
    here when this module comes first.
    """


import torch  # noqa: E402

from torch_tpu.version import __version__  # noqa: E402

__all__ = ["__version__", "export"]


def __getattr__(name: str) -> object:
    """``torch_tpu.export``, loaded at first use."""
    if name == "export":
        from torch_tpu.stablehlo import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load() -> None:
    """Make the device known, in this order; each step needs the ones before."""
    # 1. The native core: guard, hooks and native ops register themselves when it is loaded.
    from torch_tpu import _C, plugin

    # 2. Which plug-in will drive the device; it is loaded at first use.
    choice = plugin.choose()
    if choice is not None:
        _C.configure(choice.path, choice.kind, choice.num_devices)

    # 3. The name "tpu", the module torch.tpu, tensor and module methods, autocast, serialisation.
    from torch_tpu import registration

    registration.register()

    # 4. A kernel for every op that has a lowering, and the catch-all.
    from torch_tpu.eager import host_ops, kernels, nested, read_back, sparse

    kernels.register_kernels()
    host_ops.register()
    read_back.register()
    sparse.register()
    nested.register()

    # 5. Libraries that have to be told of the device, when they are imported.
    from torch_tpu import integrations

    integrations.install()

    # 6. A clean end.
    atexit.register(_let_autograd_finish)


def _let_autograd_finish() -> None:
    """Leave autograd's device threads a moment without the GIL before Python goes away.

    A backward pass returns before its thread has dropped the graph, which may hold Python objects.
    A thread that asks for the GIL of an interpreter in finalisation is ended in mid-flight, and
    that aborts the process.
    """
    if torch.tpu.is_initialized():
        time.sleep(0.02)


if not hasattr(torch, "tpu"):
    try:
        _load()
    except ImportError:
        # The command line has to start all the same, to say why the native core is missing.
        from torch_tpu.cli.launch import started_as_module

        if not started_as_module():
            raise
