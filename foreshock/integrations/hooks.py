"""Observe methods of a framework's objects, and modules when they are imported, without changing what they do.

An observer sees the arguments and the result of a call after it returned. An error in an observer is logged once and
not raised: training continues as if there were no observer.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from foreshock.client.reporting import LogOnce

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[tuple[Any, ...], dict[str, Any], Any], None]

_MARK = "__foreshock_observed__"


def observe(owner: Any, method: str, log: LogOnce, *, before: Before | None = None, after: After | None = None) -> bool:
    """Call `before(arguments, keywords)` and `after(arguments, keywords, result)` around each call of `owner.method`.

    `owner` is an object, a class or a module. Returns False if it has no such method. A method that is observed already
    stays as it is.
    """
    original = getattr(owner, method, None)
    if not callable(original):
        return False
    if is_observed(owner, method):
        return True
    named = f"{getattr(owner, '__name__', type(owner).__name__)}.{method}"

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if before is not None:
            guard(functools.partial(before, arguments, keywords), log, named)
        result = original(*arguments, **keywords)
        if after is not None:
            guard(functools.partial(after, arguments, keywords, result), log, named)
        return result

    mark_observed(call)
    setattr(owner, method, call)
    return True


def mark_observed(wrapper: Any) -> None:
    """Let `is_observed` return True for a method that was replaced by `wrapper`."""
    setattr(wrapper, _MARK, True)


def is_observed(owner: Any, method: str) -> bool:
    """Return True if `owner.method` has an observer."""
    return bool(getattr(getattr(owner, method, None), _MARK, False))


def guard(function: Callable[[], None], log: LogOnce, where: str) -> None:
    """Call `function`; log what it raises once per kind and place, and return."""
    try:
        function()
    except Exception as error:
        log.exception(f"{where} {type(error).__name__}", f"{where} could not be observed, training continues", error)


def fits(framework: str, column: str, found: Iterable[int], expected: Iterable[int], log: LogOnce) -> bool:
    """Return whether a column has the shape, or the lengths, of the responses; if not, log one warning."""
    sizes = [[int(size) for size in each] for each in (found, expected)]
    same = sizes[0] == sizes[1]
    if not same:
        shown = " and the responses have ".join(textwrap.shorten(str(each), 60) for each in sizes)
        log.warning(f"shape of {column}", f"{framework}: {column} has {shown}: it is not logged, the rest is")
    return same


def hold_numbers(framework: str, column: str, rows: Any, lengths: Sequence[int], log: LogOnce) -> bool:
    """Return whether a column has a row of numbers for each response; if not, log one warning."""
    try:
        shapes = [tuple(np.shape(row)) for row in rows]
    except (TypeError, ValueError):
        shapes = []
    if shapes and all(len(shape) == 1 for shape in shapes):
        if not fits(framework, column, [size for (size,) in shapes], lengths, log):
            return False
        if all(hasattr(row, "detach") or np.asarray(row).dtype.kind in "biuf" for row in rows):
            return True
    log.warning(
        f"rows of {column}",
        f"{framework}: {column} is not a row of numbers for each response: it is not logged, the rest is",
    )
    return False


def is_number(value: object) -> bool:
    """Return True for a number, and for an array or tensor that is one."""
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0)


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
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                self._function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
