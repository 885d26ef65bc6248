"""Compiled programs beyond this process: the host's directory, then a remote root.

The native core (csrc/dispatch/executables.cpp) asks here for every program that is new to the
process: :func:`find` answers with a :class:`Ticket`, which carries what to load, or else the lock
under which the core compiles and hands in the result. So of several processes that start the same
work one compiles each program, and the others wait and load.

Nothing that goes wrong here keeps a program from running: it is compiled, and a warning says once
what was wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property

from torch_tpu.program import identity
from torch_tpu.program.cache_settings import TIER3, Settings, read_settings
from torch_tpu.program.remote import Remote
from torch_tpu.program.store import Description, Refused, Store, decode, encode

# A holder's end releases its lock; this is for one that hangs.
LOCK_SECONDS = 300.0
_MAX_REMOTE_ERRORS = 3

_warned: set[str] = set()


def _warn(kind: str, message: str) -> None:
    """Warns once a process about each kind of trouble."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"torch_tpu compile cache: {message}", RuntimeWarning, stacklevel=2)


@dataclass
class Tiers:
    """What this process uses of the settings; a tier that fails is given up for its lifetime."""

    settings: Settings
    store: Store | None = None
    writable: bool = True
    remote_errors: int = 0

    def __post_init__(self) -> None:
        directory = self.settings.directory
        if directory is None:
            return
        try:
            self.store = Store(directory, self.settings.limit)
        except Refused as reason:
            _warn("directory", f"{directory} is not used: it {reason}")
        except OSError as error:
            _warn("directory", f"{directory} cannot be used: {error}")

    @cached_property
    def target(self) -> bytes:
        memory = self.store.root / "plugins.json" if self.store is not None else None
        return identity.target_identity(memory)

    @cached_property
    def remote(self) -> Remote | None:
        url = self.settings.remote
        if url is None:
            return None
        try:
            target = hashlib.sha256(self.target).hexdigest()[:16]
            return Remote(url, target, self.remote_failed)
        except Exception as error:  # a file system's own
            what = f"it {error}" if isinstance(error, Refused) else f"{error}"
            _warn("remote", f"TORCH_TPU_{TIER3}={url} is not used: {what}")
            return None

    def remote_failed(self, error: Exception) -> None:
        self.remote_errors += 1
        _warn("remote", f"{self.settings.remote}: {type(error).__name__}: {error}")

    def key(self, text: str | bytes, options: bytes) -> str:
        digest = hashlib.sha256()
        program = text if isinstance(text, bytes) else text.encode()
        for part in (self.target, options, program):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()

    def read(self, key: str) -> bytes | None:
        """The payload in the host's directory."""
        if self.store is None:
            return None
        try:
            data = self.store.read(key)
            return None if data is None else decode(data, key)[1]
        except Refused as reason:
            _warn("entry", f"{self.store.path(key)} is not used: it {reason}")
        except OSError as error:
            _warn("read", f"{self.store.path(key)} cannot be read: {error}")
        return None

    def fetch(self, key: str) -> bytes | None:
        """The payload at the remote root; put into the host's directory too."""
        if self.remote is None or self.remote_errors >= _MAX_REMOTE_ERRORS:
            return None
        try:
            data = self.remote.read(key)
            if data is None:
                return None
            payload = decode(data, key)[1]
        except Exception as error:  # a file system's own, or Refused
            self.remote_failed(error)
            return None
        self.write(key, data)
        return payload

    def write(self, key: str, data: bytes) -> None:
        if self.store is None or not self.writable:
            return
        try:
            self.store.write(key, data)
        except OSError as error:
            self.writable = False
            _warn("write", f"{self.store.root}: nothing more is stored: {error}")

    def upload(self, key: str, data: bytes) -> None:
        if self.remote is not None and self.remote_errors < _MAX_REMOTE_ERRORS:
            self.remote.write(key, data)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Holds the key's lock if it can be had; who cannot have it goes without."""
        with contextlib.ExitStack() as stack:
            if self.store is not None:
                try:
                    if not stack.enter_context(self.store.lock(key, LOCK_SECONDS)):
                        _warn("lock", f"no lock within {LOCK_SECONDS:.0f} s: compiling without it")
                except OSError as error:
                    # Read-only, and nobody else writes there either; or no locks on this system.
                    if os.access(self.store.root, os.W_OK):
                        _warn("lock", f"{self.store.root} cannot be locked: {error}")
            yield


@cache
def tiers() -> Tiers | None:
    """What this process uses, None if the environment turns it off. Raises ValueError."""
    settings = read_settings()
    return Tiers(settings) if settings.enabled else None


def reload() -> None:
    """Reads the environment again at the next program, and warns again of what is wrong."""
    tiers.cache_clear()
    _warned.clear()


_off = False


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Compile every program that is new to the process, and keep none beyond it."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


@dataclass
class Ticket:
    """The answer for one program; the core calls :meth:`close` when it has its executable.

    `source` says where `payload` comes from: "disk", "remote" or, with no payload, "".
    """

    tiers: Tiers
    key: str
    name: str
    payload: bytes | None = None
    source: str = ""
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def look(self) -> None:
        """Fills `payload`, or takes the lock to compile under."""
        self.payload, self.source = self.tiers.read(self.key), "disk"
        if self.payload is None:
            self.held.enter_context(self.tiers.lock(self.key))
            self.payload = self.tiers.read(self.key)
        if self.payload is None:
            self.payload, self.source = self.tiers.fetch(self.key), "remote"
        if self.payload is None:
            self.source = ""
        else:
            self.held.close()

    def reject(self, message: str) -> None:
        """The plug-in could not load the payload: forget it, and prepare for compiling."""
        store = self.tiers.store
        where = store.path(self.key) if store is not None else self.tiers.settings.remote
        _warn("load", f"{where} could not be loaded: {message}")
        self.payload, self.source = None, ""
        if store is not None:
            with contextlib.suppress(OSError):
                store.drop(self.key)
        self.held.enter_context(self.tiers.lock(self.key))

    def store(self, payload: bytes, seconds: float) -> None:
        """Keeps what the compiler made in `seconds`."""
        data = encode(
            Description(self.key, self.name, identity.plugin_label(), round(seconds, 6)), payload
        )
        self.tiers.write(self.key, data)
        self.tiers.upload(self.key, data)

    def cannot_store(self, message: str) -> None:
        """The plug-in could not serialise what it compiled."""
        _warn("serialise", f"{self.name} is not stored: {message}")

    def close(self) -> None:
        self.held.close()


def find(name: str, text: str | bytes, options: bytes) -> Ticket | None:
    """Looks a program up; None if nothing is cached beyond this process.

    Waits while another process compiles the same program.
    """
    using = None if _off else tiers()
    if using is None or (using.store is None and using.settings.remote is None):
        return None
    ticket = Ticket(using, using.key(text, options), name)
    try:
        ticket.look()
    except BaseException:
        ticket.close()
        raise
    return ticket
