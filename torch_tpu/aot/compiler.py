"""The TPU compiler in worker processes: in parallel, with time-outs, one failure at a time."""

from __future__ import annotations

import atexit
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch_tpu import plugin
from torch_tpu.aot import worker
from torch_tpu.aot.topology import CompilerNotFoundError, TpuCompileError
from torch_tpu.aot.worker import Reply, Request

DEFAULT_TIMEOUT = 1800.0  # seconds; large training steps take minutes
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class HbmExceededError(TpuCompileError):
    """The program needs more memory than a device has: ``needed`` and ``available`` bytes.

    Both are 0 if the compiler's message does not tell.
    """

    needed = 0
    available = 0


class CompilerCrashError(TpuCompileError):
    """The compiler ended its process, or did not answer in time."""


def _error(kind: type[TpuCompileError], code: str, message: str) -> TpuCompileError:
    error = kind(message)
    error.code = code
    return error


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit.upper()])


def error_of(reply: Reply) -> TpuCompileError | None:
    """The exception that a reply stands for; None if it is a program."""
    if not reply.code:
        return None
    if reply.code != "RESOURCE_EXHAUSTED":
        return _error(TpuCompileError, reply.code, reply.message)
    error = _error(HbmExceededError, reply.code, reply.message)
    assert isinstance(error, HbmExceededError)
    sizes = re.findall(r"\b([\d.]+)([KMGT]?)i?B?\b(?=[) ])", reply.message.replace("(", " "))
    found = [_bytes(n, unit) for n, unit in sizes if unit]
    if len(found) >= 2:
        error.needed, error.available = found[0], found[1]
    return error


class _Worker:
    """One compiler process, started when first asked and again after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def ask(self, request: Request, timeout: float) -> Reply:
        """The compiler's reply; one with code "CRASH" or "TIMEOUT" if there was none."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            worker.send(process.stdin, request)
            data = _read_message(process.stdout.fileno(), time.monotonic() + timeout)
        except TimeoutError:
            self.close()
            return Reply("TIMEOUT", f"the TPU compiler gave no answer within {timeout:.0f} s")
        except (BrokenPipeError, EOFError):
            status = process.wait()
            words = self._last_words()
            self.close()
            return Reply("CRASH", f"the TPU compiler ended its process ({status}): {words}")
        return data

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._log.seek(0)
            self._log.truncate()
            root = str(Path(__file__).parents[2])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch_tpu.aot.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={
                    "TPU_MIN_LOG_LEVEL": "2",
                    "TPU_STDERR_LOG_LEVEL": "2",
                    **os.environ,
                    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                    "PYTHONPATH": os.pathsep.join(paths),
                },
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):  # what was not sent yet has nobody to read it
                        stream.close()
            self._process = None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        marked = [n for n in lines if "check failure" in n.lower() or re.match(r"F\d{4} ", n)]
        return " ".join((marked or lines[-3:])[:3])[:600]


def _read_message(fd: int, deadline: float) -> Any:
    import pickle

    (size,) = struct.unpack("<Q", _read(fd, 8, deadline))
    return pickle.loads(_read(fd, size, deadline))


def _read(fd: int, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


_idle: list[_Worker] = []
_lock = threading.Lock()


@contextmanager
def _borrowed() -> Iterator[_Worker]:
    """A worker for the calling thread alone; it goes back to the pool afterwards."""
    with _lock:
        mine = _idle.pop() if _idle else _Worker()
    try:
        yield mine
    finally:
        with _lock:
            _idle.append(mine)


def close_workers() -> None:
    """End the compiler processes that nobody uses; the next request starts new ones."""
    with _lock:
        workers = list(_idle)
        _idle.clear()
    for one in workers:
        one.close()


atexit.register(close_workers)


def require_libtpu() -> str:
    """The path of libtpu; CompilerNotFoundError, with how to install it, if there is none."""
    path = plugin.libtpu_path()
    if path is None:
        raise CompilerNotFoundError(
            "compiling for a TPU needs libtpu, which is not installed; "
            "run `pip install 'torch-tpu[tpu]'`, or set TPU_LIBRARY_PATH to a libtpu.so"
        )
    return path


def compile_all(
    requests: Sequence[Request],
    *,
    jobs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    done: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """Compile every request, ``jobs`` at a time; replies come in the order of the requests.

    jobs     compiler processes; default: half the cores, since one uses several threads
    timeout  seconds for each request
    done     called with the index and the reply of each request as it is ready, from any thread

    A program that does not compile, or kills the compiler, is a reply with a ``code``; see
    :func:`error_of`. Raises CompilerNotFoundError without libtpu.
    """
    require_libtpu()
    jobs = jobs or max(1, (os.cpu_count() or 2) // 2)

    def run(index: int) -> Reply:
        with _borrowed() as mine:
            reply = mine.ask(requests[index], timeout)
        if done is not None:
            done(index, reply)
        return reply

    with ThreadPoolExecutor(min(jobs, len(requests)) or 1) as pool:
        return list(pool.map(run, range(len(requests))))
