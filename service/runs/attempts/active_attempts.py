"""Which attempt a step survives in: the newest one whose `resume_step` ≤ step. Older tails are superseded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, false, or_

from service.platform.database.tables import Attempt


@dataclass(frozen=True, slots=True)
class SurvivingRange:
    """The steps `first` ≤ step < `end` survive in `attempt`; `end` None: without end."""

    attempt: int
    first: int
    end: int | None


def surviving_ranges(attempts: Iterable[Attempt]) -> list[SurvivingRange]:
    """The ranges of steps that survive, newest attempt first; they do not overlap."""
    ranges: list[SurvivingRange] = []
    end: int | None = None
    for attempt in sorted(attempts, key=lambda each: each.attempt, reverse=True):
        if end is None or attempt.resume_step < end:
            ranges.append(SurvivingRange(attempt.attempt, attempt.resume_step, end))
            end = attempt.resume_step
    return ranges


def surviving_attempt(attempts: Iterable[Attempt], step: int) -> int | None:
    """The attempt that the step survives in; None where every attempt begins after it."""
    for each in surviving_ranges(attempts):
        if each.first <= step and (each.end is None or step < each.end):
            return each.attempt
    return None


def survives(attempts: Sequence[Attempt], attempt: Any, step: Any) -> ColumnElement[bool]:
    """SQL: whether the row of these two columns survives."""
    conditions = []
    for each in surviving_ranges(attempts):
        within = [attempt == each.attempt, step >= each.first]
        if each.end is not None:
            within.append(step < each.end)
        conditions.append(and_(*within))
    return or_(*conditions) if conditions else false()
