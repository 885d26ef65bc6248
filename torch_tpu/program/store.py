"""The host's directory of compiled programs: one user's processes share it.

An entry is one file: a header with a hash over everything behind it, a description, and what the
plug-in serialised. An entry is code, so it is loaded only if this user (or root) owns it, nobody
else may write it, it is whole, and it says itself that it belongs to the key that was asked for.
Files appear by rename, so a reader sees all of an entry or none; losing a race or a process costs
a compilation, never a wrong program.

    programs/ab/abcdef…   entries by key; the modification time is the last use
    locks/ab              locked while a key of that prefix is compiled
    temporary/            entries being written
    size                  bytes in programs/, as last counted
    plugins.json          hashes of plug-in files (see identity.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_MAGIC = b"torch_tpu program 1\n"
_LENGTH = struct.Struct("<I")
_HEADER = len(_MAGIC) + 32 + _LENGTH.size
_HOUR = 3600.0


class Refused(Exception):
    """A directory or an entry that must not be used; the message says why."""


@dataclass(frozen=True)
class Description:
    """What an entry says about itself: for reports, except `key`, which is checked."""

    key: str
    program: str  # what it was compiled for first, such as "aten::add.Tensor"
    plugin: str
    compile_seconds: float


@dataclass(frozen=True)
class Entry:
    """A file of the store: its size in bytes and the time of its last use in seconds."""

    key: str
    path: Path
    size: int
    used: float


def encode(description: Description, payload: bytes) -> bytes:
    """The file of an entry."""
    text = json.dumps(asdict(description)).encode()
    body = b"".join((_LENGTH.pack(len(text)), text, payload))
    return b"".join((_MAGIC, hashlib.sha256(body).digest(), body))


def decode(data: bytes, key: str) -> tuple[Description, bytes]:
    """Description and payload of an entry's file. Raises Refused if it is not whole, or not ours,
    or belongs to another key.
    """
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER:
        raise Refused("is no compiled program of this version")
    view = memoryview(data)
    body = view[len(_MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : len(_MAGIC) + 32]:
        raise Refused("is damaged: its contents do not match their hash")
    description, start = _describe(body)
    if description.key != key:
        raise Refused(f"belongs to the key {description.key[:16]}…")
    return description, bytes(body[start:])


def _describe(body: memoryview) -> tuple[Description, int]:
    """The description a body begins with, and where the payload starts."""
    try:
        (length,) = _LENGTH.unpack(body[: _LENGTH.size])
        fields = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
        description = Description(**{name: fields[name] for name in Description.__annotations__})
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise Refused(f"has a description that cannot be read: {error!r}") from None
    return description, _LENGTH.size + length


def peek(path: Path) -> Description | None:
    """The description in an entry's file, unchecked, for reports; None if it has none."""
    try:
        with open(path, "rb") as file:
            data = file.read(4096)
        if data[: len(_MAGIC)] != _MAGIC:
            return None
        return _describe(memoryview(data)[len(_MAGIC) + 32 :])[0]
    except (OSError, Refused):
        return None


def why_not_trusted(info: os.stat_result) -> str | None:
    """Why a file or directory of these properties must not provide code; None if it may."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"is owned by uid {info.st_uid}, not by uid {os.geteuid()} or root"
    if info.st_mode & stat.S_IWOTH:
        return "may be written by everybody"
    return None


def _make_private(directory: Path) -> None:
    """mkdir -p, with every directory it makes private to the user."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)


class Store:
    """The directory at `root`, made if need be, holding at most about `limit` bytes.

    Raises Refused if somebody else may write there, and OSError if it cannot be made. The methods
    raise OSError where the file system does.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit
        self._programs = root / "programs"
        self._locks = root / "locks"
        self._temporary = root / "temporary"
        _make_private(root)
        reason = why_not_trusted(root.stat())
        if not root.is_dir():
            reason = "is no directory"
        if reason is not None:
            raise Refused(reason)

    def path(self, key: str) -> Path:
        return self._programs / key[:2] / key

    def read(self, key: str, touch: bool = True) -> bytes | None:
        """The file of `key`, None if there is none; counts as a use. Raises Refused."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self.path(key), flags)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            info = os.fstat(fd)
            reason = why_not_trusted(info)
            if not stat.S_ISREG(info.st_mode):
                reason = "is no file"
            if reason is not None:
                raise Refused(reason)
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
        finally:
            os.close(fd)
        # Kept to the hour: a write for each read would be too much. A future time is a wrong one.
        if touch and not 0 <= time.time() - info.st_mtime < _HOUR:
            with contextlib.suppress(OSError):
                os.utime(self.path(key))
        return data

    def write(self, key: str, data: bytes) -> None:
        """Puts the file of `key` in place, whole or not at all; may evict others."""
        if len(data) > self.limit:
            return
        for directory in (self._temporary, self.path(key).parent):
            _make_private(directory)
        temporary = self._temporary / f"{key}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, self.path(key))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if self._add_to_size(len(data)) > self.limit:
            # Well below the limit, or the next write would have to look through all files again.
            self.evict(int(self.limit * 0.8))

    def drop(self, key: str) -> None:
        """Removes the file of `key` if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.path(key).unlink()

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[bool]:
        """Holds the lock of `key`; gives False if it was not to be had within `seconds`.

        The kernel releases it when its holder ends, however that comes about.
        """
        self._locks.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self._locks / key[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline, pause = time.monotonic() + seconds, 0.001
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        held = False
                        break
                    time.sleep(pause)
                    pause = min(pause * 1.5, 0.02)
            yield held
            if held:
                # Closing alone would leave it with a child forked meanwhile.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def entries(self) -> list[Entry]:
        """All entries, the least recently used first."""
        now, found = time.time(), []
        with contextlib.suppress(FileNotFoundError):
            for shard in os.scandir(self._programs):
                if not shard.is_dir(follow_symlinks=False):
                    continue
                for file in os.scandir(shard.path):
                    with contextlib.suppress(FileNotFoundError):
                        info = file.stat(follow_symlinks=False)
                        used = min(info.st_mtime, now)
                        found.append(Entry(file.name, Path(file.path), info.st_size, used))
        return sorted(found, key=lambda entry: entry.used)

    def evict(self, limit: int, older_than: float | None = None) -> list[Entry]:
        """Removes what was used least recently until at most `limit` bytes are left, and all that
        was last used before the time `older_than`; returns what it removed.
        """
        entries = self.entries()
        total, removed = sum(entry.size for entry in entries), []
        for entry in entries:
            if total <= limit and not (older_than is not None and entry.used < older_than):
                break
            with contextlib.suppress(FileNotFoundError):
                entry.path.unlink()
            total -= entry.size
            removed.append(entry)
        self._remove_leftovers()
        with self._size_file() as fd:
            self._put_size(fd, total)
        return removed

    def _remove_leftovers(self) -> None:
        """Removes what killed writers left behind."""
        with contextlib.suppress(FileNotFoundError):
            for file in os.scandir(self._temporary):
                with contextlib.suppress(FileNotFoundError):
                    if abs(time.time() - file.stat(follow_symlinks=False).st_mtime) > _HOUR:
                        os.unlink(file.path)

    @contextlib.contextmanager
    def _size_file(self) -> Iterator[int]:
        fd = os.open(self.root / "size", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held for microseconds
            yield fd
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    @staticmethod
    def _put_size(fd: int, size: int) -> None:
        text = str(size).encode()
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))

    def _add_to_size(self, size: int) -> int:
        """Adds to the kept size and returns it. It is only an estimate between two evictions."""
        with self._size_file() as fd:
            text = os.pread(fd, 32, 0)
            if text.isdigit():
                size += int(text)
            else:  # the first entry, or a damaged file
                size = sum(entry.size for entry in self.entries())
            self._put_size(fd, size)
        return size
