"""The states of a job, the transitions between them, and its rank in the queue. Functions query nothing.

    queued ──claim──▶ running ──complete──▶ done
      ▲                 │ ├──fail final────▶ failed    (and the probe's other jobs with it)
      │                 │ └──fail skipped──▶ skipped   (and the probe's other jobs with it)
      └─fail retry, lease expired─┘ (after the last try: failed, "poisoned", with every try's reason)

A claim raises the job's fencing token by one. Only the holder of the newest token may change a job, so that a worker
that comes back late is refused.

A queued job's rank follows from its priority and its age. A level of priority counts as one day of waiting: among jobs
that were queued on the same day the higher priority comes first, then the older job, and a job of any priority is ahead
of each one that was queued three days after it.
"""

from __future__ import annotations

from enum import StrEnum

from foreshock_service.platform.database.tables.probes import Lease, ProbeJob

# A worker is live if it asked for a job or sent a heartbeat within this time. A lease request waits 60 s at most.
LIVE_MINUTES = 5
LONGEST_REASON = 2_000


class JobState(StrEnum):
    """The state of a job or of a probe."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Outcome(StrEnum):
    """The end of a lease."""

    COMPLETED = "completed"
    RETRY = "retry"
    FINAL = "final"
    SKIPPED = "skipped"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.SKIPPED})
# The outcomes that the exporter counts as failures.
FAILURES = (Outcome.RETRY, Outcome.FINAL, Outcome.EXPIRED)


def claim(
    job: ProbeJob, lease_id: str, worker: str, now_us: int, duration_us: int, environment: str | None = None
) -> int:
    """Give the queued job to a worker until `now_us + duration_us` and return the new fencing token.

    `environment` is the one that the worker scores it in; None: as the worker is.
    """
    assert job.state == JobState.QUEUED
    job.state = JobState.RUNNING
    job.tries += 1
    job.fencing_token += 1
    job.lease_id = lease_id
    job.worker = worker
    job.environment = environment
    job.lease_expires_at_us = now_us + duration_us
    return job.fencing_token


def holds(job: ProbeJob, lease: Lease, token: int) -> bool:
    """Return whether this lease, with this token, owns the job.

    A lease past its end owns the job until a sweep or a claim expires it: a late heartbeat alone discards no work.
    """
    return job.state == JobState.RUNNING and job.lease_id == lease.id and job.fencing_token == lease.token == token


def extend(job: ProbeJob, now_us: int, duration_us: int) -> int:
    """Extend the lease and return its new end, never earlier than the old one."""
    job.lease_expires_at_us = max(job.lease_expires_at_us or 0, now_us + duration_us)
    return job.lease_expires_at_us


def complete(job: ProbeJob, lease: Lease, now_us: int) -> None:
    """End the job as done: the scores that its newest token uploaded count."""
    _end_lease(job, lease, Outcome.COMPLETED, None, now_us)
    _end_job(job, JobState.DONE, None, now_us)


def give_back(job: ProbeJob, lease: Lease, reason: str, now_us: int, most_tries: int) -> None:
    """Queue the job again after a try that failed; after the last try, fail it."""
    _end_lease(job, lease, Outcome.RETRY, reason, now_us)
    _count_failed_try(job, lease, reason, now_us, most_tries)


def expire(job: ProbeJob, lease: Lease, now_us: int, lease_seconds: float, most_tries: int) -> None:
    """Queue a job again whose worker sent no heartbeat in time; after the last try, fail it."""
    reason = f"lease expired: no heartbeat for {lease_seconds:g} s"
    _end_lease(job, lease, Outcome.EXPIRED, reason, now_us)
    _count_failed_try(job, lease, reason, now_us, most_tries)


def end(job: ProbeJob, lease: Lease, outcome: Outcome, reason: str, now_us: int) -> None:
    """End a job that another try cannot do: FINAL fails it, SKIPPED means that its weights are gone."""
    _end_lease(job, lease, outcome, reason, now_us)
    job.reasons = [*job.reasons, _reason_of_try(lease, reason)]
    _end_job(job, JobState.SKIPPED if outcome is Outcome.SKIPPED else JobState.FAILED, _short(reason), now_us)


def cancel(job: ProbeJob, lease: Lease | None, state: JobState, reason: str, now_us: int) -> None:
    """End an unfinished job because its probe has ended; its holder is fenced off."""
    if lease is not None:
        _end_lease(job, lease, Outcome.CANCELLED, reason, now_us)
    _end_job(job, state, _short(reason), now_us)


def requeue(job: ProbeJob, now_us: int) -> None:
    """Queue an ended job again with all its tries. The fencing token keeps counting."""
    job.state = JobState.QUEUED
    job.tries = 0
    job.reason = None
    job.worker = None
    job.environment = None
    job.queued_at_us = now_us
    set_priority(job, Priority(job.priority))
    job.finished_at_us = None


def state_of_probe(jobs: list[ProbeJob]) -> tuple[JobState, str | None]:
    """Return a probe's state and reason, from those of its jobs."""
    states = {JobState(job.state) for job in jobs}
    if states <= ENDED:
        for state in (JobState.FAILED, JobState.SKIPPED):
            if state in states:
                return state, next((job.reason for job in jobs if job.state == state), None)
        return JobState.DONE, None
    return (JobState.QUEUED if states == {JobState.QUEUED} else JobState.RUNNING), None


def _count_failed_try(job: ProbeJob, lease: Lease, reason: str, now_us: int, most_tries: int) -> None:
    job.reasons = [*job.reasons, _reason_of_try(lease, reason)]
    if job.tries >= most_tries:
        _end_job(job, JobState.FAILED, _short(f"given up after {job.tries} tries; last: {reason}"), now_us)
        return
    # `queued_at_us` and `rank_us` stay: the job keeps its place in the queue.
    job.state = JobState.QUEUED
    job.worker = None


def _end_lease(job: ProbeJob, lease: Lease, outcome: Outcome, reason: str | None, now_us: int) -> None:
    lease.outcome = outcome
    lease.reason = _short(reason) if reason is not None else None
    lease.ended_at_us = now_us
    job.lease_id = None
    job.lease_expires_at_us = None


def _end_job(job: ProbeJob, state: JobState, reason: str | None, now_us: int) -> None:
    job.state = state
    job.reason = reason
    job.finished_at_us = now_us


def _reason_of_try(lease: Lease, reason: str) -> str:
    return _short(f"try {lease.token} on {lease.worker}: {reason}")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


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
