"""Keys of steps, and which steps of a run are active.

A step is active in the newest attempt whose `resume_step` ≤ step. Steps of older attempts from there on are superseded;
they are kept and not shown by default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, false, or_


class AttemptStart(NamedTuple):
    """The number of an attempt, and the step that it begins at."""

    attempt: int
    resume_step: int


@dataclass(frozen=True, slots=True)
class ActiveRange:
    """Range of steps `first` ≤ step < `end`, active in `attempt`; no upper bound if `end` is None."""

    attempt: int
    first: int
    end: int | None

    def contains(self, attempt: Any, step: Any) -> list[ColumnElement[bool]]:
        """Return the SQL conditions for rows of this range, given the row's two columns."""
        within = [attempt == self.attempt, step >= self.first]
        return within if self.end is None else [*within, step < self.end]


def active_ranges(attempts: Iterable[AttemptStart], first: int = 0, last: int | None = None) -> list[ActiveRange]:
    """Return the ranges of active steps within `first` ≤ step ≤ `last` (None: no bound), newest attempt first.

    They do not overlap, and each begins beyond the end of the next.
    """
    ranges: list[ActiveRange] = []
    end = None if last is None else last + 1
    for attempt in sorted(attempts, key=lambda each: each.attempt, reverse=True):
        begin = max(attempt.resume_step, first)
        if end is None or begin < end:
            ranges.append(ActiveRange(attempt.attempt, begin, end))
            end = begin
    return ranges


def active_attempt_of(attempts: Iterable[AttemptStart], step: int) -> int | None:
    """Return the attempt in which the step is active; None if every attempt begins after it."""
    found = active_ranges(attempts, step, step)
    return found[0].attempt if found else None


def is_active(
    attempts: Sequence[AttemptStart], attempt: Any, step: Any, first: int = 0, last: int | None = None
) -> ColumnElement[bool]:
    """Return the SQL condition for rows of active steps with `first` ≤ step ≤ `last`, given the row's two columns.

    Bounds that lie within one attempt give a plain range of the primary key, which is read without a sort.
    """
    conditions = [and_(*each.contains(attempt, step)) for each in active_ranges(attempts, first, last)]
    return or_(*conditions) if conditions else false()
