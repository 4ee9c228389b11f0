"""What each event does to a job. Every rule of leasing is here and nothing here queries: rows in, rows changed.

    queued ──claim──▶ running ──complete──▶ done
      ▲                 │ ├──fail final────▶ failed    (and the probe's other jobs with it)
      │                 │ └──fail skipped──▶ skipped   (and the probe's other jobs with it)
      └─fail retry, lease expired─┘ (after the last try: failed, "poisoned", with every try's reason)

A claim raises the job's fencing token by one. Only the holder of the newest token may change anything, so a worker that
comes back late is refused whatever it still believes.
"""

from __future__ import annotations

from enum import StrEnum

from service.platform.database.tables.probes import Lease, ProbeJob

LONGEST_REASON = 2_000


class JobState(StrEnum):
    """Where a job, or the probe it belongs to, is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Outcome(StrEnum):
    """How a lease ended."""

    COMPLETED = "completed"
    RETRY = "retry"
    FINAL = "final"
    SKIPPED = "skipped"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.SKIPPED})
# Outcomes that say something went wrong: what the exporter counts.
FAILURES = (Outcome.RETRY, Outcome.FINAL, Outcome.EXPIRED)


def claim(job: ProbeJob, lease_id: str, worker: str, now_us: int, duration_us: int) -> int:
    """Give the queued job to a worker until `now_us + duration_us`; returns the new fencing token."""
    assert job.state == JobState.QUEUED
    job.state = JobState.RUNNING
    job.tries += 1
    job.fencing_token += 1
    job.lease_id = lease_id
    job.worker = worker
    job.lease_expires_at_us = now_us + duration_us
    return job.fencing_token


def holds(job: ProbeJob, lease: Lease, token: int) -> bool:
    """Whether this lease, with this token, still owns the job.

    A lease past its time that nobody has noticed yet still holds: the work is not lost for a late heartbeat.
    """
    return job.state == JobState.RUNNING and job.lease_id == lease.id and job.fencing_token == lease.token == token


def extend(job: ProbeJob, now_us: int, duration_us: int) -> int:
    """A heartbeat: the lease's new end, never earlier than the one it had."""
    job.lease_expires_at_us = max(job.lease_expires_at_us or 0, now_us + duration_us)
    return job.lease_expires_at_us


def complete(job: ProbeJob, lease: Lease, now_us: int) -> None:
    """The job is done and what its newest token uploaded counts."""
    _end_lease(job, lease, Outcome.COMPLETED, None, now_us)
    _end_job(job, JobState.DONE, None, now_us)


def give_back(job: ProbeJob, lease: Lease, reason: str, now_us: int, most_tries: int) -> None:
    """The try went wrong in a way that another try may not: queue it again, or give up after the last."""
    _end_lease(job, lease, Outcome.RETRY, reason, now_us)
    _count_failed_try(job, lease, reason, now_us, most_tries)


def expire(job: ProbeJob, lease: Lease, now_us: int, most_tries: int) -> None:
    """The worker was not heard of in time: queue the job again, or give up after the last try."""
    reason = "the worker was not heard of in time"
    _end_lease(job, lease, Outcome.EXPIRED, reason, now_us)
    _count_failed_try(job, lease, reason, now_us, most_tries)


def is_overdue(job: ProbeJob, now_us: int) -> bool:
    """Whether the job's lease has ended without a heartbeat, a completion or a failure."""
    return job.state == JobState.RUNNING and job.lease_expires_at_us is not None and job.lease_expires_at_us <= now_us


def end(job: ProbeJob, lease: Lease, outcome: Outcome, reason: str, now_us: int) -> None:
    """No try can help: FINAL fails the job, SKIPPED says that there was nothing to do it with."""
    _end_lease(job, lease, outcome, reason, now_us)
    job.reasons = [*job.reasons, _said_by(lease, reason)]
    _end_job(job, JobState.SKIPPED if outcome is Outcome.SKIPPED else JobState.FAILED, _short(reason), now_us)


def cancel(job: ProbeJob, lease: Lease | None, state: JobState, reason: str, now_us: int) -> None:
    """End a job that has not ended because its probe has; whoever holds it is fenced off."""
    if lease is not None:
        _end_lease(job, lease, Outcome.CANCELLED, reason, now_us)
    _end_job(job, state, _short(reason), now_us)


def requeue(job: ProbeJob, now_us: int) -> None:
    """An operator wants an ended job tried again: it has all its tries; the token goes on counting."""
    job.state = JobState.QUEUED
    job.tries = 0
    job.reason = None
    job.worker = None
    job.queued_at_us = now_us
    job.finished_at_us = None


def state_of_probe(jobs: list[ProbeJob]) -> tuple[JobState, str | None]:
    """A probe's state and its reason, from those of its jobs."""
    states = {JobState(job.state) for job in jobs}
    if states <= ENDED:
        for state in (JobState.FAILED, JobState.SKIPPED):
            if state in states:
                return state, next((job.reason for job in jobs if job.state == state), None)
        return JobState.DONE, None
    return (JobState.QUEUED if states == {JobState.QUEUED} else JobState.RUNNING), None


def _count_failed_try(job: ProbeJob, lease: Lease, reason: str, now_us: int, most_tries: int) -> None:
    job.reasons = [*job.reasons, _said_by(lease, reason)]
    if job.tries >= most_tries:
        _end_job(job, JobState.FAILED, _short(f"given up after {job.tries} tries; the last: {reason}"), now_us)
        return
    job.state = JobState.QUEUED
    job.worker = None
    # It keeps its place in the queue: `queued_at_us` stays.


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


def _said_by(lease: Lease, reason: str) -> str:
    return _short(f"try {lease.token} on {lease.worker}: {reason}")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
