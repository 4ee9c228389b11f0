"""Curves that were read before: a process reads only the rows of newer steps, and keeps the JSON of the others.

`newest_measurements` tells, in one small query, whether a comparison has newer steps or rows that were written again;
so the answer is right whichever process stored the rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import numpy as np

from foreshock_service.platform.columnar.formats import json_columns
from foreshock_service.platform.columnar.table import Column, ColumnTable, Labels

# About ten curves of 20 measures over 10,000 steps, with their JSON.
_MOST_BYTES = 64 << 20
_MOST_ANSWER_BYTES = 32 << 20
_MOST_PIECES = 64


@dataclass(frozen=True, slots=True)
class ComparisonRevision:
    """The state of a comparison of a run: it grows, and the part before the last rewriting is void."""

    revision: int
    rewritten: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RememberedCurve:
    """The rows of one comparison in order of step; the JSON of each column without its brackets, once it was asked for.

    The JSON is in pieces, oldest first: a step that arrives adds one and copies none.
    """

    revision: ComparisonRevision
    table: ColumnTable
    json: Sequence[Mapping[str, bytes]] | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return 8 * self.table.num_values + sum(len(each) for piece in self.json or () for each in piece.values())


class CurveMemory:
    """The curves that were asked for last, by what was asked, and the answers that were sent last, by their versions.

    Each process has one.
    """

    def __init__(self) -> None:
        self._curves = _Kept[RememberedCurve](_MOST_BYTES)
        self._answers = _Kept[bytes](_MOST_ANSWER_BYTES)

    def get(
        self,
        key: Hashable,
        revision: ComparisonRevision,
        read_after: Callable[[int], ColumnTable],
        *,
        with_json: bool = False,
    ) -> RememberedCurve:
        """Return the curve; `read_after(step)` reads its rows beyond a step, sorted (−1: all of them)."""
        known = self._curves.get(key)
        if known is not None and known.revision == revision:
            curve = known
        elif known is not None and _is_grown(known.revision, revision) and known.table.num_rows:
            curve = _extended(known, revision, read_after(int(known.table.array("step")[-1])))
        else:
            curve = RememberedCurve(revision, read_after(-1))
        if with_json and curve.json is None:
            curve = replace(curve, json=(json_columns(curve.table),))
        if curve is not known:
            self._curves.put(key, curve, curve.size)
        return curve

    def answer(self, version: Hashable, render: Callable[[], bytes]) -> bytes:
        """Return the body of this version, rendered unless it was sent before."""
        body = self._answers.get(version)
        if body is None:
            body = render()
            self._answers.put(version, body, len(body))
        return body


Value = TypeVar("Value")


class _Kept(Generic[Value]):
    """Values by key, up to so many bytes; those that were not used for longest go first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._bytes += size - before
            self._values[key] = value, size
            while self._bytes > self._most_bytes:
                _, (_, oldest) = self._values.popitem(last=False)
                self._bytes -= oldest


def joined_tables(tables: Sequence[ColumnTable]) -> ColumnTable:
    """Return the rows of these tables, which have the same columns, one after the other."""
    if len(tables) == 1:
        return tables[0]
    columns: dict[str, Column] = {}
    for name, first in tables[0].columns.items():
        if isinstance(first, Labels):
            columns[name] = _joined_labels([cast(Labels, table.columns[name]) for table in tables])
        else:
            columns[name] = np.concatenate([table.array(name) for table in tables])
    return ColumnTable(columns)


def _joined_labels(labels: Sequence[Labels]) -> Labels:
    names = sorted({name for each in labels for name in each.names})
    places = {name: place for place, name in enumerate(names)}
    codes = [np.array([places[name] for name in each.names], dtype=np.int32)[each.codes] for each in labels]
    return Labels(np.concatenate(codes), names)


def joined_json(curves: Sequence[Sequence[Mapping[str, bytes]]]) -> dict[str, list[bytes]]:
    """Return the pieces of JSON of each column of several curves, one after the other."""
    pieces = [piece for curve in curves for piece in curve]
    return {name: [each for piece in pieces if (each := piece[name])] for name in pieces[0]}


def _is_grown(known: ComparisonRevision, now: ComparisonRevision) -> bool:
    return known.rewritten == now.rewritten and known.attempt == now.attempt


def _extended(known: RememberedCurve, revision: ComparisonRevision, newer: ColumnTable) -> RememberedCurve:
    if not newer.num_rows:
        return replace(known, revision=revision)
    json = known.json
    if json is not None:
        json = (*json, json_columns(newer))
        if len(json) > _MOST_PIECES:
            json = ({name: b",".join(pieces) for name, pieces in joined_json([json]).items()},)
    return RememberedCurve(revision, joined_tables([known.table, newer]), json)
