"""A process that compiles StableHLO for TPU topologies with libtpu.

Apart from the user's process, because libtpu reads the environment, holds a lock, prints to the
standard output, and ends its process on some programs. Messages are pickles behind an 8-byte
length: a :class:`Request` in, a :class:`Reply` out.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Request:
    """Compile ``text`` for ``topology``; over all its devices if ``partitions`` is more than 1.

    ``verdict_only``: the reply says whether it compiles, and carries no program.
    """

    text: str
    topology: str
    partitions: int = 1
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    verdict_only: bool = False


@dataclass(frozen=True)
class Reply:
    """What the compiler made of a program, or its error (``code`` is PJRT's)."""

    code: str = ""
    message: str = ""
    seconds: float = 0.0
    version: str = ""
    hbm_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    analysis: dict[str, Any] = field(default_factory=dict)
    hlo: bytes = b""
    hlo_kind: str = ""
    executable: bytes = b""
    cached: bool = False


def send(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message; EOFError where the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def answer(request: Request) -> Reply:
    from torch_tpu import _C
    from torch_tpu.aot.topology import TpuCompileError, topology

    start = time.perf_counter()
    try:
        slice_ = topology(request.topology)
        ids = [d["id"] for d in slice_.devices][: request.partitions]
        options = _C.compile_options(request.options, ids if request.partitions > 1 else [])
        program = slice_.compile(request.text, options)
    except TpuCompileError as error:
        return Reply(code=error.code, message=str(error), seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if request.verdict_only:
        return Reply(seconds=seconds, version=slice_.platform_version)
    kind, hlo = program.optimized_program()
    return Reply(
        seconds=seconds,
        version=slice_.platform_version,
        hbm_bytes=int(slice_.attributes.get("device_memory_bytes_limit", 0)),
        memory=program.memory_stats() or {},
        analysis=program.cost_analysis() or {},
        hlo=hlo,
        hlo_kind=kind,
        executable=program.serialize(),
    )


def main() -> None:
    # libtpu prints to the standard output: answers go out through a copy of it.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        while True:
            try:
                request = receive(sys.stdin.buffer)
            except EOFError:
                return
            send(out, answer(request))


if __name__ == "__main__":
    # Under its importable name, so that what is pickled here can be read by the other side.
    from torch_tpu.aot.worker import main as run

    run()
