"""TPU topologies by name, and StableHLO compiled for them by libtpu."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch_tpu import _C, plugin

Topology = _C.Topology
CompiledProgram = _C.CompiledProgram
# A RuntimeError; ``code`` names the PJRT code, "RESOURCE_EXHAUSTED" for one that does not fit.
TpuCompileError = _C.PjrtError

# What libtpu wants to know before it loads on a machine that is no TPU VM: not to ask the cloud's
# metadata server (which takes minutes to fail), what it would have answered, and not to hold the
# lock that lets one process at a time use the chips.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_environment_lock = threading.Lock()


class CompilerNotFoundError(ImportError):
    """libtpu is not installed."""


def topology(target: str = "v6e:1x1") -> Topology:
    """The topology of a name in libtpu's spelling: "v5e:2x2", "v6e:1x1", "tpu7x:4x4x4".

    Raises CompilerNotFoundError without libtpu and TpuCompileError for a name it does not know.
    """
    path = plugin.libtpu_path()
    if path is None:
        raise CompilerNotFoundError(
            "compiling for a TPU needs libtpu, which is not installed; "
            "run `pip install 'torch-tpu[tpu]'`, or set TPU_LIBRARY_PATH to a libtpu.so"
        )
    return _topology(path, target)


def compile_stablehlo(
    text: str, target: str = "v6e:1x1", options: bytes | None = None
) -> CompiledProgram:
    """Compile a StableHLO module for ``target`` with the TPU compiler.

    text     the module, its matmul precision and all else as they stand
    target   a topology's name, see :func:`topology`
    options  a serialised CompileOptionsProto; default: one device

    Raises CompilerNotFoundError without libtpu and TpuCompileError, with the compiler's message,
    for a program that does not compile or does not fit in the device's memory.
    """
    return topology(target).compile(text, _C.compile_options({}) if options is None else options)


@cache
def _topology(path: str, target: str) -> Topology:
    with _libtpu_environment():
        return Topology.create(path, target)


@contextmanager
def _libtpu_environment() -> Iterator[None]:
    """Set what libtpu reads while it loads; afterwards the environment is what it was.

    What the user has set stays. Where libtpu drives this process's device, the machine's own
    description is the right one and nothing is set.
    """
    with _environment_lock:
        wanted = {} if _C.plugin_kind() == "tpu" else _LIBTPU_ENVIRONMENT
        added = [name for name in wanted if name not in os.environ]
        os.environ.update({name: wanted[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
