"""The remote root of compiled programs: a bucket or a shared path, through fsspec.

Entries are the host directory's files (see store.py) under ``<root>/<target>/<key>.bin``. What lies
there is code: whoever may write to the root decides what every process that names it runs.
"""

from __future__ import annotations

import atexit
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

from torch_tpu.program.store import Refused

_SECONDS_AT_EXIT = 20.0


class Remote:
    """The root at `url`; `target` (hexadecimal digits) is the part of it for this plug-in.

    Raises Refused for a local directory that everybody may write to, ImportError where fsspec or
    the package for the URL's scheme is missing, and ValueError for an unknown scheme.
    """

    def __init__(self, url: str, target: str, on_error: Callable[[Exception], None]) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._folder = f"{root.rstrip('/')}/{target}"
        self._on_error = on_error
        self._uploads: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local and os.path.exists(root) and os.stat(root).st_mode & stat.S_IWOTH:
            raise Refused("may be written by everybody")

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}.bin"

    def read(self, key: str) -> bytes | None:
        """The entry's file, None if there is none. Raises what fsspec does."""
        try:
            return self._fs.cat_file(self._path(key))
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        """Uploads the entry's file in the background."""
        with self._changed:
            if self._worker is None:
                atexit.register(self.flush, _SECONDS_AT_EXIT)
                self._worker = threading.Thread(
                    target=self._upload_all, name="torch_tpu-upload", daemon=True
                )
                self._worker.start()
            self._pending += 1
        self._uploads.put((key, data))

    def flush(self, seconds: float) -> bool:
        """Waits for uploads; returns whether all were done within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout=seconds)

    def _upload_all(self) -> None:
        while True:
            key, data = self._uploads.get()
            try:
                self._upload(key, data)
            except Exception as error:
                self._on_error(error)
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _upload(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._fs.makedirs(self._folder, exist_ok=True)
        if not self._local:
            self._fs.pipe_file(path, data)  # object stores show an object when it is whole
            return
        temporary = f"{path}.{os.getpid()}.{time.monotonic_ns()}"
        self._fs.pipe_file(temporary, data)
        os.replace(temporary, path)
