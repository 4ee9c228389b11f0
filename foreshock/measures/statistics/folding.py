"""Merge what was measured of parts, such as shards or data-parallel ranks, into what it is of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self, TypeVar

from foreshock.errors import StatisticsError

__all__ = ["Mergeable", "fold"]


class Mergeable(Protocol):
    """What has a `merge`: ComparisonStatistics, StepStatistics, Comparison, StepMeasurement."""

    def merge(self, other: Self, /) -> Self:
        """The same over the rollouts of both."""


Part = TypeVar("Part", bound=Mergeable)


def fold(parts: Iterable[Part]) -> Part:
    """All parts as one, merged in the order given; sums do not depend on it to 1e-12 and better.

    Raises StatisticsError where there is no part.
    """
    merged: Part | None = None
    for part in parts:
        merged = part if merged is None else merged.merge(part)
    if merged is None:
        raise StatisticsError("there is nothing to fold: give at least one part")
    return merged
