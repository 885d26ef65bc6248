"""Something to do when another library is imported, without importing it.

``after_import("accelerate.state", function)`` calls ``function(module)`` right after that module
has run, or at once if it has run already. Importing the libraries ourselves would cost every
process seconds, and most use none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["after_import"]

Callback = Callable[[ModuleType], None]


class _Loader(Loader):
    """A module's own loader, then the callbacks."""

    def __init__(self, loader: Loader, callbacks: Sequence[Callback]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module sees the loader it would have had.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)


class _Finder(MetaPathFinder):
    """Wraps the loader of the modules that are waited for, once each."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        # Its entry is gone: this asks the finders behind us.
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


_finder = _Finder()


def after_import(name: str, callback: Callback) -> None:
    """Call ``callback`` with the module ``name`` once it is imported; at once if it is already."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(callback)
