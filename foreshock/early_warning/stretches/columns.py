"""Closed steps as columns, and what several parts of the state ask of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.early_warning.detectors import ClosedStep
from foreshock.early_warning.events import Event

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ClosedSteps:
    """Closed steps in ascending order: `steps` int64 [N], and `columns` float64 [N] by ``comparison:measure``, NaN for
    a missing value. `rebaseline` are the steps at which a change was announced.
    """

    steps: NDArray[np.int64]
    columns: Mapping[str, Floats]
    rebaseline: frozenset[int] = frozenset()

    @classmethod
    def of(cls, closed: Sequence[ClosedStep]) -> ClosedSteps:
        """Return the columns of some closed steps."""
        keys = sorted({key for each in closed for key in each.values})
        columns = {key: np.array([each.values.get(key, np.nan) for each in closed], dtype=np.float64) for key in keys}
        steps = np.array([each.step for each in closed], dtype=np.int64)
        return cls(steps, columns, frozenset(each.step for each in closed if each.rebaseline))

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, first: int, end: int) -> ClosedSteps:
        """Return the steps with `first` ≤ index < `end`."""
        columns = {key: column[first:end] for key, column in self.columns.items()}
        return ClosedSteps(self.steps[first:end], columns, self.rebaseline)

    def column(self, key: str) -> Floats:
        """Return a column, shape [N]; NaN for every step if no step has the value."""
        found = self.columns.get(key)
        return np.full(len(self), np.nan) if found is None else found

    def at(self, index: int) -> ClosedStep:
        """Return one step."""
        step = int(self.steps[index])
        values = {key: value for key, column in self.columns.items() if (value := float(column[index])) == value}
        return ClosedStep(step, values, step in self.rebaseline)


def runs_of(flags: Flags, before: int) -> tuple[int, int]:
    """Return the length of the longest and of the last run of True, if `before` of them precede the first flag."""
    breaks = np.flatnonzero(~flags)
    if not breaks.size:
        return before + flags.size, before + flags.size
    last = int(flags.size - 1 - breaks[-1])
    first = before + int(breaks[0]) if breaks[0] else 0
    between = int(np.diff(breaks).max()) - 1 if breaks.size > 1 else 0
    return max(first, between, last), last


def rolling_median(values: Floats, count: int) -> Floats:
    """Return the median of every `count` values in a row, shape [N − count + 1], bit for bit as `robust.median`."""
    ordered = np.sort(np.lib.stride_tricks.sliding_window_view(values, count), axis=1)
    middle = count // 2
    if count % 2:
        return ordered[:, middle]
    found: Floats = 0.5 * (ordered[:, middle - 1] + ordered[:, middle])
    return found


def firing_flags(count: int, fires: bool, events: Iterable[tuple[int, Event]]) -> Flags:
    """Return after which of `count` steps a rule fires, from its events, each with its step's index."""
    flags = np.full(count, fires)
    for index, event in events:
        flags[index:] = event.change == "fired"
    return flags
