"""The page of the Python reference: the public names of each package, documented by their docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
from types import ModuleType
from typing import Final

_HEAD: Final = """# Python

The public names of these modules. `import foreshock` imports neither torch nor a web framework;
names are imported when they are first used.
"""
MODULES: Final = {
    "foreshock": "Log, follow the advice, read",
    "foreshock.errors": "Errors",
    "foreshock.rollouts": "Rollouts and their codec",
    "foreshock.measures": "Measures",
    "foreshock.measures.exact": "Exact divergences",
    "foreshock.corrections": "Corrections",
    "foreshock.theory": "Theory",
    "foreshock.lint": "The semantics lint",
    "foreshock.learning_rate": "Learning rate",
    "foreshock.integrations.trl": "TRL",
    "foreshock.exporters": "Exporters",
    "foreshock.importers": "Importers",
    "foreshock.healthy_ranges": "Healthy ranges",
    "foreshock.scorers": "Scorers",
}
"""Documented modules -> title."""
_NOT_DOCUMENTED = frozenset({"__version__"})


def page() -> str:
    """Return the text of the page, in which `::: name` stands for the documentation of a name.

    A name that another module has already listed becomes a link.
    """
    parts, places = [_HEAD], dict[str, str]()
    for module, title in MODULES.items():
        parts.append(f"## {title}: `{module}`\n\n{_first_paragraph(module)}\n")
        for name in public_names(module):
            path = _definition(module, name)
            if path in places:
                parts.append(f"`{name}`: see [`{places[path]}.{name}`][{path}].\n")
            else:
                places[path] = module
                if not path.endswith(f".{name}"):
                    parts.append(f"[`{module}.{name}`][{path}] is the name of:\n")
                parts.append(f"::: {path}\n")
    return "\n".join(parts)


def public_names(module: str) -> list[str]:
    """Return the documented names of a module, in order: its `__all__`, or what it defines without an underscore."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or _defined_names(found)
    return [name for name in sorted(names) if name not in _NOT_DOCUMENTED]


def _defined_names(module: ModuleType) -> list[str]:
    """Return the names without an underscore that a module defines."""
    names = []
    for statement in ast.parse(inspect.getsource(module)).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def _first_paragraph(module: str) -> str:
    return " ".join((importlib.import_module(module).__doc__ or "").strip().partition("\n\n")[0].split())


def _definition(module: str, name: str) -> str:
    """Return the path at which the name is defined; constants and type aliases are at their module's own path."""
    value = getattr(importlib.import_module(module), name)
    home = getattr(value, "__module__", None) or ""
    return f"{home}.{value.__qualname__}" if home.startswith("foreshock.") and callable(value) else f"{module}.{name}"
