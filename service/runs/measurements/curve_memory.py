"""Curves that were read before: a process reads only the rows of newer steps, and keeps the JSON of the others.

`newest_measurements` tells, in one small query, whether a comparison has newer steps or rows that were written again;
so the answer is right whichever process stored the rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from service.platform.columnar.formats import json_columns
from service.platform.columnar.table import ColumnTable, Labels

# About ten curves of 20 measures over 10,000 steps, with their JSON.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ComparisonRevision:
    """The state of a comparison of a run: it grows, and the part before the last rewriting is void."""

    revision: int
    rewritten: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RememberedCurve:
    """The rows of one comparison in order of step, and the JSON of each column without its brackets."""

    revision: ComparisonRevision
    table: ColumnTable
    json: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return 8 * self.table.num_values + sum(map(len, self.json.values()))


class CurveMemory:
    """The curves that were asked for last, by what was asked."""

    def __init__(self) -> None:
        self._curves: OrderedDict[Hashable, RememberedCurve] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, revision: ComparisonRevision, read_after: Callable[[int], ColumnTable]
    ) -> RememberedCurve:
        """Return the curve; `read_after(step)` reads its rows beyond a step, sorted (−1: all of them)."""
        with self._lock:
            known = self._curves.get(key)
            if known is not None:
                self._curves.move_to_end(key)
        if known is not None and known.revision == revision:
            return known
        if known is not None and _is_grown(known.revision, revision) and known.table.num_rows:
            curve = _extended(known, revision, read_after(int(known.table.array("step")[-1])))
        else:
            table = read_after(-1)
            curve = RememberedCurve(revision, table, json_columns(table))
        self._remember(key, curve)
        return curve

    def _remember(self, key: Hashable, curve: RememberedCurve) -> None:
        with self._lock:
            before = self._curves.pop(key, None)
            self._bytes += curve.size - (before.size if before is not None else 0)
            self._curves[key] = curve
            while self._bytes > _MOST_BYTES:
                _, oldest = self._curves.popitem(last=False)
                self._bytes -= oldest.size


def joined_tables(tables: list[ColumnTable]) -> ColumnTable:
    """Return the rows of these tables, which have the same columns, one after the other."""
    if len(tables) == 1:
        return tables[0]
    columns = {}
    for name, first in tables[0].columns.items():
        if isinstance(first, Labels):
            strings = [text for table in tables for text in table.strings(name)]
            names = sorted(set(strings))
            places = {text: place for place, text in enumerate(names)}
            columns[name] = Labels(np.array([places[text] for text in strings], dtype=np.int32), names)
        else:
            columns[name] = np.concatenate([table.array(name) for table in tables])
    return ColumnTable(columns)


def joined_json(curves: list[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the JSON of the columns of several curves, one after the other."""
    return {name: b",".join([each for curve in curves if (each := curve[name])]) for name in curves[0]}


def _is_grown(known: ComparisonRevision, now: ComparisonRevision) -> bool:
    return known.rewritten == now.rewritten and known.attempt == now.attempt


def _extended(known: RememberedCurve, revision: ComparisonRevision, newer: ColumnTable) -> RememberedCurve:
    if not newer.num_rows:
        return RememberedCurve(revision, known.table, known.json)
    table = joined_tables([known.table, newer])
    return RememberedCurve(revision, table, joined_json([known.json, json_columns(newer)]))
