"""Attempts: get or create by the client's key; find the one in which a step is active."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.runs import AttemptRecord
from foreshock.clock import now_us
from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.engine import insert_if_absent, upsert
from foreshock_service.platform.database.tables import Attempt, AttemptClient
from foreshock_service.platform.parameters import CursorKey, Page, decode_cursor, page_of
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts import repository
from foreshock_service.runs.attempts.active_attempts import AttemptStart, active_attempt_of
from foreshock_service.runs.attempts.schemas import AttemptCreate, Heartbeat
from foreshock_service.runs.events import AttemptStarted, ItemsLost
from foreshock_service.runs.runs.service import get_run, lock_run, note_sign_of_life
from foreshock_service.runs.step_key import StepKey

_KNOWN = "foreshock.attempts"
BEGUN_TOGETHER_SECONDS = 60
"""Attempts that begin within this time may be ranks of one launch that did not find each other."""


class AttemptNotFound(ProblemError):
    """The run has no such attempt."""

    status = 404
    problem_type = "attempt-not-found"


class AttemptConflict(ProblemError):
    """Conflict: an attempt of that key exists and begins at another step."""

    status = 409
    problem_type = "attempt-conflict"


def get_or_create_attempt(
    session: Session, events: EventBus, principal: Principal, run_id: str, body: AttemptCreate
) -> tuple[Attempt, bool]:
    """Return the attempt of this key, and True if it is new; raise AttemptConflict if `resume_step` differs."""
    run = lock_run(session, principal, run_id)
    row = {
        "run_id": run_id,
        "attempt": repository.next_number(session, run_id),
        "created_at_us": now_us(),
        **body.model_dump(exclude={"heartbeats"}),
    }
    created = insert_if_absent(session, Attempt, row)
    session.info.pop(_KNOWN, None)
    attempt = repository.find_by_key(session, run_id, body.key)
    assert attempt is not None
    if attempt.resume_step != body.resume_step:
        raise AttemptConflict(
            f"the attempt {body.key!r} resumes at step {attempt.resume_step}, not {body.resume_step}: "
            "give each resume its own key"
        )
    if body.heartbeats:
        note_sign_of_life(run, resumed=created)
    if created and attempt.attempt > 1:
        events.publish(session, AttemptStarted(run_id, attempt.attempt, attempt.resume_step))
    return attempt, created


def note_heartbeat(
    session: Session, events: EventBus, principal: Principal, run_id: str, attempt: int, client: str, body: Heartbeat
) -> None:
    """Store a heartbeat; publish ItemsLost if the client has lost more items than before."""
    run = lock_run(session, principal, run_id)
    check_attempt(session, run_id, attempt)
    before = repository.lost_by_clients(session, run_id, attempt)
    row = {"run_id": run_id, "attempt": attempt, "client": client, "seen_at_us": now_us(), **body.model_dump()}
    upsert(session, AttemptClient, [row], ("run_id", "attempt", "client"))
    note_sign_of_life(run)
    lost = repository.lost_by_clients(session, run_id, attempt) if body.lost else before
    if lost > before:
        events.publish(session, ItemsLost(run_id, attempt, run.last_step or 0, lost, body.reason))


def attempts_begun_together(session: Session, run_id: str, attempt: int) -> list[Attempt]:
    """Return the other attempts of the run that began within a minute of this one."""
    attempts = repository.of_run(session, run_id)
    begun = next(each.created_at_us for each in attempts if each.attempt == attempt)
    return [
        each
        for each in attempts
        if each.attempt != attempt and abs(each.created_at_us - begun) <= BEGUN_TOGETHER_SECONDS * 1_000_000
    ]


def find_attempt(session: Session, run_id: str, attempt: int) -> Attempt | None:
    """Return the attempt with this number; None if there is none."""
    return repository.find(session, run_id, attempt)


def attempts_of_run(session: Session, run_id: str) -> Sequence[AttemptStart]:
    """Return where every attempt of a run begins, in order; a session asks once."""
    known: dict[str, Sequence[AttemptStart]] = session.info.setdefault(_KNOWN, {})
    if run_id not in known:
        known[run_id] = repository.starts_of_run(session, run_id)
    return known[run_id]


def fingerprints_of_attempts(session: Session, run_id: str, attempts: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return the fingerprints with which these attempts were started, by number."""
    return repository.fingerprints(session, run_id, attempts)


def list_attempts(
    session: Session, principal: Principal, run_id: str, cursor: str | None, limit: int
) -> Page[AttemptRecord]:
    """Return one page of a run's attempts, in order."""
    get_run(session, principal, run_id)
    after = int(decode_cursor(cursor, (int,))[0]) if cursor is not None else 0
    rows = repository.page_of_run(session, run_id, after, limit + 1)
    return page_of([from_attributes(AttemptRecord, row) for row in rows], limit, _key_of)


def require_attempt(session: Session, run_id: str, attempt: int) -> Attempt:
    """Return the attempt; raise AttemptNotFound if there is none."""
    found = repository.find(session, run_id, attempt)
    if found is None:
        raise attempt_not_found(run_id, attempt)
    return found


def check_attempt(session: Session, run_id: str, attempt: int) -> None:
    """Raise AttemptNotFound if the run has no such attempt."""
    if all(each.attempt != attempt for each in attempts_of_run(session, run_id)):
        raise attempt_not_found(run_id, attempt)


def attempt_not_found(run_id: str, attempt: int) -> AttemptNotFound:
    """Return the error for an attempt that does not exist."""
    return AttemptNotFound(f"the run has no attempt {attempt}: create it with POST /v1/runs/{run_id}/attempts")


def resolve_step(session: Session, run_id: str, step: int, attempt: int | None) -> StepKey:
    """Return the step's key in `attempt`; None: in the attempt in which it is active. Raises AttemptNotFound."""
    if attempt is not None:
        check_attempt(session, run_id, attempt)
        return StepKey(run_id, attempt, step)
    active = active_attempt_of(attempts_of_run(session, run_id), step)
    if active is None:
        raise AttemptNotFound(f"no attempt of the run holds step {step}")
    return StepKey(run_id, active, step)


def _key_of(attempt: AttemptRecord) -> CursorKey:
    return (attempt.attempt,)
