"""The rank of a job in the queue, from its priority and its age.

A level of priority counts as one day of waiting: among jobs that were queued on the same day the higher priority comes
first, then the older job, and a job of any priority is ahead of each one that was queued three days after it.
"""

from __future__ import annotations

from enum import StrEnum

from foreshock_service.platform.database.tables.probes import ProbeJob

HEAD_START_US = 24 * 3_600 * 1_000_000
"""The lead of a priority over the one below it, in microseconds of waiting."""


class Priority(StrEnum):
    """The priority of a job, lowest first. `urgent`: the default for steps near an open alert."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    URGENT = "urgent"


_LEVELS = {priority: level for level, priority in enumerate(Priority)}


def rank_us(queued_at_us: int, priority: Priority) -> int:
    """Return the rank of a queued job in microseconds; the job with the lowest rank is leased first."""
    return queued_at_us - _LEVELS[priority] * HEAD_START_US


def set_priority(job: ProbeJob, priority: Priority) -> None:
    """Set the priority of a job and the rank that follows from it."""
    job.priority = priority
    job.rank_us = rank_us(job.queued_at_us, priority)
