"""Scorers of other packages: entry points of the group `foreshock.scorers`.

An entry has the scorer's name and points to its row, a `foreshock.scorers.Scorer`. The row's module is imported
wherever the table is, so it must import its engine inside the function that scores. An entry that is broken or takes a
name in use is refused without an error here, because a trainer imports the table too.
"""

import importlib.metadata
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

ENTRY_POINT_GROUP = "foreshock.scorers"
_NAME = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Found(Generic[Row]):
    """Rows by name, and a sentence for each entry that was refused."""

    rows: dict[str, Row]
    refused: tuple[str, ...]


def found_in_packages(kind: type[Row], taken: Collection[str], engines: Collection[str]) -> Found[Row]:
    """Return the rows that installed packages add. `taken` are the names in use, `engines` the allowed engines."""
    return rows_of(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), kind, taken, engines)


def rows_of(
    points: Iterable[importlib.metadata.EntryPoint], kind: type[Row], taken: Collection[str], engines: Collection[str]
) -> Found[Row]:
    """Return the rows of entry points; if two have one name, both are refused."""
    by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    rows: dict[str, Row] = {}
    refused: list[str] = []
    for name, same in sorted(by_name.items()):
        reason, row = _read(name, same, kind, taken, engines)
        if reason is None:
            rows[name] = row
        else:
            origins = ", ".join(sorted(_origin(point) for point in same))
            refused.append(f"the scorer {name!r} of {origins} is refused: {reason}")
    return Found(rows, tuple(refused))


def _read(
    name: str,
    points: list[importlib.metadata.EntryPoint],
    kind: type[Row],
    taken: Collection[str],
    engines: Collection[str],
) -> tuple[str | None, Any]:
    """Return (reason of a refusal, row)."""
    if name in taken:
        return "Foreshock has a scorer of that name; rename the entry and its row", None
    if len(points) > 1:
        return "several packages have a scorer of that name; remove all but one", None
    if not _NAME.fullmatch(name):
        return "a name must be two words with a dot between them, such as 'torch.float64'", None
    try:
        row: Any = points[0].load()
    except Exception as error:
        return f"{points[0].value} cannot be imported: {type(error).__name__}: {error}", None
    if not isinstance(row, kind):
        return f"{points[0].value} must be a foreshock.scorers.Scorer, got {type(row).__name__}", None
    return _wrong(row, name, engines), row


def _wrong(row: Any, name: str, engines: Collection[str]) -> str | None:
    if row.name != name:
        return f"its row has the name {row.name!r}; both must be equal"
    if row.engine not in engines:
        return f"its engine must be one of {', '.join(sorted(engines))}, got {row.engine!r}"
    if not row.implementation or ":" not in row.implementation:
        return f"its implementation must be 'module:function', got {row.implementation!r}"
    return None


def _origin(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
