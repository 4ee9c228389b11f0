"""The active steps of a run: a step is active in the newest attempt whose `resume_step` ≤ step.

Steps of older attempts from there on are superseded; they are kept and not shown by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, false, or_

from service.platform.database.tables import Attempt


@dataclass(frozen=True, slots=True)
class ActiveRange:
    """The steps `first` ≤ step < `end`, which are active in `attempt`; `end` None: no upper bound."""

    attempt: int
    first: int
    end: int | None


def active_ranges(attempts: Iterable[Attempt]) -> list[ActiveRange]:
    """Return the ranges of active steps, newest attempt first; they do not overlap."""
    ranges: list[ActiveRange] = []
    end: int | None = None
    for attempt in sorted(attempts, key=lambda each: each.attempt, reverse=True):
        if end is None or attempt.resume_step < end:
            ranges.append(ActiveRange(attempt.attempt, attempt.resume_step, end))
            end = attempt.resume_step
    return ranges


def active_attempt_of(attempts: Iterable[Attempt], step: int) -> int | None:
    """Return the attempt in which the step is active; None if every attempt begins after it."""
    for each in active_ranges(attempts):
        if each.first <= step and (each.end is None or step < each.end):
            return each.attempt
    return None


def is_active(attempts: Sequence[Attempt], attempt: Any, step: Any) -> ColumnElement[bool]:
    """Return the SQL condition that the row with these two columns is of an active step."""
    conditions = []
    for each in active_ranges(attempts):
        within = [attempt == each.attempt, step >= each.first]
        if each.end is not None:
            within.append(step < each.end)
        conditions.append(and_(*within))
    return or_(*conditions) if conditions else false()
