"""The import rules of the service that import-linter cannot state: nouns call services, and there is no cycle."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.paths import REPOSITORY

SERVICE = REPOSITORY / "service"
PARTS = ("platform", "runs", "replay", "watch", "present", "maintenance")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((SERVICE / "foreshock_service").rglob("*.py")):
        name = ".".join(path.relative_to(SERVICE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of the service that a module imports, by full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "foreshock_service":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def noun_of(module: str) -> str:
    """Return the noun of a module: `foreshock_service.runs.steps` for `foreshock_service.runs.steps`."""
    parts = module.split(".")
    in_part = len(parts) > 2 and parts[1] in PARTS and (SERVICE / Path(*parts[:3])).is_dir()
    return ".".join(parts[:3]) if in_part else module


def test_no_noun_imports_the_repository_of_another() -> None:
    found = [
        f"{module} imports {imported}"
        for module, path in MODULES.items()
        for imported in imports(path)
        if imported.endswith(".repository") and noun_of(imported) != noun_of(module)
    ]
    assert not found, "\n".join(found)


def test_no_noun_imports_a_private_name_of_another() -> None:
    """The queries of a noun in one file are private functions."""
    found = [
        f"{module} imports {node.module}.{alias.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "foreshock_service"
        for alias in node.names
        if alias.name.startswith("_") and noun_of(node.module) != noun_of(module)
    ]
    assert not found, "\n".join(found)


def test_no_cycle_between_the_nouns_of_the_service() -> None:
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        graph[noun_of(module)] |= {noun_of(imported) for imported in imports(path)} - {noun_of(module)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("a cycle of imports: " + " → ".join(error.args[1])) from error
