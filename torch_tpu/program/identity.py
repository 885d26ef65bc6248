"""What an executable depends on besides its program: the plug-in's build and the device it is for.

The CPU plug-in's version string is "cpu" whatever its build, so the plug-in's file itself is the
identity: the linker's build id where there is one, else a hash over the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import platform
import struct
from functools import cache
from pathlib import Path
from typing import Any

from torch_tpu import _C

# Change compilation without being part of the compile options.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_MEGACORE")


def build_id(path: Path) -> str | None:
    """The GNU build id of a 64-bit ELF file as hexadecimal digits, None if it has none.

    Source: System V ABI, "ELF header", "program header" and "note section".
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            return None
        (table,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        for i in range(count):
            kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", data, table + i * size)
            end = min(start + length, len(data))
            while kind == 4 and start + 12 <= end:  # PT_NOTE
                name, value, note = struct.unpack_from("<III", data, start)
                first = start + 12 + (name + 3 & ~3)
                if note == 3 and data[start + 12 : start + 16] == b"GNU\0":  # NT_GNU_BUILD_ID
                    return data[first : first + value].hex()
                start = first + (value + 3 & ~3)
    return None


def file_identity(path: Path, memory: Path | None) -> str:
    """Tells builds of a shared library apart.

    Hashing a plug-in takes half a second, so `memory`, a file, keeps hashes by path, size and time.
    """
    found = build_id(path)
    if found is not None:
        return f"build-id:{found}"
    info = path.stat()
    place = f"{path.resolve()} {info.st_size} {info.st_mtime_ns} {info.st_ino}"
    known: dict[str, str] = {}
    if memory is not None:
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(memory.read_text())
            if isinstance(known, dict) and isinstance(known.get(place), str):
                return known[place]
    with open(path, "rb") as file:
        identity = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if memory is not None:
        known = {**known, place: identity} if isinstance(known, dict) else {place: identity}
        with contextlib.suppress(OSError):
            temporary = memory.with_name(f"{memory.name}.{os.getpid()}")
            temporary.write_text(json.dumps(known))
            temporary.chmod(0o600)
            temporary.replace(memory)
    return identity


def host_processor() -> str:
    """The host's instruction set: XLA:CPU compiles for the very processor it runs on."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        first = file.read(16384).split("\n\n", 1)[0].splitlines()
        facts = ("model name", "flags", "Features", "CPU implementer", "CPU part", "cpu family")
        return "\n".join(line for line in first if line.startswith((*facts, "model\t")))
    return platform.processor()


@cache
def plugin_label() -> str:
    """The plug-in for a person: "cpu 0.81", "TPU v6 lite 0.117"."""
    info = _C.plugin_info()
    major, minor = info["api_version"]
    return f"{info['device_kinds'][0]} {major}.{minor}"


def target_identity(memory: Path | None) -> bytes:
    """What keys of executables for the current plug-in and device begin with."""
    info: dict[str, Any] = _C.plugin_info()
    path = Path(info["path"])
    facts = {
        "plugin": file_identity(path, memory),
        "platform": (info["platform_name"], info["platform_version"]),
        "api": info["api_version"],
        "devices": (info["device_kinds"][0], info["devices_offered"]),
        "machine": platform.machine(),
        "processor": host_processor() if info["platform_name"] == "cpu" else "",
        "variables": {name: os.environ.get(name, "") for name in _VARIABLES},
    }
    return json.dumps(facts, sort_keys=True).encode()
