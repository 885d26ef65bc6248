"""Which files are the user's and which a library's, for naming the line a call comes from.

The walk over the frames is in the native core (csrc/core/source_line.cpp); it asks once per file.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
from dataclasses import dataclass
from functools import cache

import torch

from torch_tpu import _C


@cache
def _library_folders() -> tuple[str, ...]:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, here + os.sep)


@cache
def _standard_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.abspath(paths[name]) + os.sep for name in ("stdlib", "platstdlib")})


def is_library(filename: str) -> bool:
    """Whether frames of this file are passed over: PyTorch, this package, the standard library."""
    if filename.startswith("<"):
        # <stdin>, <string> (python -c) and <ipython-input-…> are typed by users.
        return filename.startswith(("<frozen", "<eval_with_key", "<torch", "<__array"))
    path = os.path.abspath(filename)
    if path.startswith(_library_folders()):
        return True
    installed = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return path.startswith(_standard_folders()) and not installed


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's Python code; ``backward``: the backward pass of what stands there."""

    file: str
    line: int
    function: str
    backward: bool = False

    @property
    def text(self) -> str:
        """The line itself, or "" where the source is not at hand."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}"
        return f"{where} (backward of it)" if self.backward else where


def line_of(number: int) -> SourceLine | None:
    """The line the native core knows by this number; None for 0."""
    known = _C.source_line(number)
    return None if known is None else SourceLine(*known)


def current_line() -> SourceLine | None:
    """The user's line that is being run: the innermost frame outside the libraries."""
    return line_of(_C.current_line())
