"""Where compiled programs are kept, as the environment says. Needs neither torch nor a plug-in.

``TORCH_TPU_CACHE_DIR``
    The host's directory; default ``$XDG_CACHE_HOME/torch_tpu``, else ``~/.cache/torch_tpu``.
``TORCH_TPU_CACHE_SIZE``
    Its limit: bytes, or a number with K, M, G or T (powers of 1,024); default 4G.
``TORCH_TPU_TIER2_COMPILATION_CACHE``
    A name: a part of the directory of its own. ``disabled``: no directory at all.
``TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT``
    A further root: a path or any URL that fsspec opens.

The last two are also read as ``TORCH_TPU_INTERNAL_TIER…``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_SIZE = "4G"
TIER2 = "TIER2_COMPILATION_CACHE"
TIER3 = "TIER3_COMPILATION_CACHE_ROOT"


@dataclass(frozen=True)
class Settings:
    """The host's directory (None: off), its limit in bytes, and the remote root (None: off)."""

    directory: Path | None
    limit: int
    remote: str | None

    @property
    def enabled(self) -> bool:
        return self.directory is not None or self.remote is not None


def parse_size(text: str, what: str) -> int:
    """Bytes of "512M". Raises ValueError naming `what`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"{what}: got {text!r}; expected a size such as 4G or 512M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _tier(environment: Mapping[str, str], name: str) -> str:
    public = environment.get(f"TORCH_TPU_{name}", "")
    return (public or environment.get(f"TORCH_TPU_INTERNAL_{name}", "")).strip()


def _default_directory(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification has relative ones ignored
        return Path(base) / "torch_tpu"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and home != "/":
        return Path(home) / ".cache" / "torch_tpu"
    return Path(tempfile.gettempdir()) / f"torch_tpu-{os.geteuid()}"


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises ValueError, naming the variable, where one has no meaning."""
    given = environment.get("TORCH_TPU_CACHE_DIR", "")
    directory: Path | None = Path(given).absolute() if given else _default_directory(environment)
    part = _tier(environment, TIER2)
    if part.lower() == "disabled":
        directory = None
    elif part and part != "default" and directory is not None:
        if not re.fullmatch(r"[\w.-]+", part) or part.startswith("."):
            raise ValueError(
                f"TORCH_TPU_{TIER2}: got {part!r}; expected a plain name, or 'disabled'"
            )
        directory = directory / part
    size = environment.get("TORCH_TPU_CACHE_SIZE") or DEFAULT_SIZE
    limit = parse_size(size, "TORCH_TPU_CACHE_SIZE")
    return Settings(directory, limit, _tier(environment, TIER3) or None)
