"""Run a function when a module of a framework has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["when_imported"]

OnImport = Callable[[ModuleType], None]


def when_imported(name: str, function: OnImport) -> None:
    """Call `function(module)` after the module `name` has been imported; at once if it is imported already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        function(module)
        return
    sys.meta_path.insert(0, _Finder(name, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the other finders, once, and lets its loader call the function."""

    def __init__(self, name: str, function: OnImport) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the awaited module with a loader that calls the function; None for any other."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._function)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader, followed by the function."""

    def __init__(self, loader: importlib.abc.Loader, function: OnImport) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call the function."""
        self._loader.exec_module(module)
        self._function(module)
