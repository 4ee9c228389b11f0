"""Runs: get or create, list, change, delete (a tombstone stays)."""

from __future__ import annotations

from typing import cast

from sqlalchemy.orm import Session

from foreshock.clock import now_us
from service.platform.database.dialect import insert_if_absent
from service.platform.database.tables import Run
from service.platform.events import EventBus
from service.platform.identifiers import new_identifier
from service.platform.pagination import CursorKey, Page, decode_cursor, page_of
from service.platform.problem import ProblemError
from service.platform.security import Principal, ScopeMissing
from service.runs.events import AdviceModeChanged
from service.runs.runs import repository
from service.runs.runs.schemas import RunCreate, RunRead, RunUpdate


class RunNotFound(ProblemError):
    """No run with this id is visible to this key."""

    status = 404


class RunDeleted(ProblemError):
    """The run was deleted; nothing more can be sent to it or read from it."""

    status = 410


def get_run(session: Session, principal: Principal, run_id: str) -> Run:
    """The run, if the principal may see it; raises RunNotFound or RunDeleted."""
    return _visible(repository.find(session, run_id), principal, run_id)


def lock_run(session: Session, principal: Principal, run_id: str) -> Run:
    """As `get_run`, and every other change of this run waits until this transaction ends.

    Steps of a run close one after the other, so that what observes them sees one order.
    """
    return _visible(repository.find_and_lock(session, run_id), principal, run_id)


def lock_run_for_background(session: Session, run_id: str) -> Run | None:
    """Lock the run as `lock_run` does, for work that no principal asked for; None if the run is gone or deleted."""
    run = repository.find_and_lock(session, run_id)
    return run if run is not None and run.deleted_at_us is None else None


def raise_newest_step(session: Session, run_id: str, step: int) -> None:
    """Set the run's newest step to `step`, unless it is beyond that already."""
    repository.raise_newest_step(session, run_id, step)


def get_or_create_run(session: Session, principal: Principal, body: RunCreate) -> tuple[Run, bool]:
    """The run of (project, key), and whether it is new; raises RunDeleted where that key was deleted before."""
    if not principal.sees(body.project):
        raise ScopeMissing(f"this key is bound to another project than {body.project!r}")
    now = now_us()
    row = {
        "id": new_identifier("run"),
        "state": "running",
        "last_step": None,
        "created_at_us": now,
        "updated_at_us": now,
        "deleted_at_us": None,
        **body.model_dump(),
    }
    created = insert_if_absent(session, Run, row)
    run = repository.find_by_key(session, body.project, body.key)
    assert run is not None
    if run.deleted_at_us is not None:
        raise RunDeleted(f"the run with key {body.key!r} was deleted: choose another key")
    return run, created


def list_runs(
    session: Session, principal: Principal, project: str | None, cursor: str | None, limit: int
) -> Page[RunRead]:
    """One page of the runs that the principal may see, newest first."""
    if principal.project is not None:
        if project is not None and project != principal.project:
            return Page(items=[])
        project = principal.project
    after = cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else None
    runs = repository.newest_first(session, project, after, limit + 1)
    return page_of([RunRead.model_validate(run) for run in runs], limit, _key_of)


def update_run(session: Session, events: EventBus, principal: Principal, run_id: str, changes: RunUpdate) -> Run:
    """Change what `changes` names."""
    run = lock_run(session, principal, run_id)
    mode_before = run.advice_mode
    for name, value in changes.model_dump(exclude_unset=True).items():
        if value is not None or name == "name":
            setattr(run, name, value)
    run.updated_at_us = now_us()
    if run.advice_mode != mode_before:
        events.publish(session, AdviceModeChanged(run_id, run.advice_mode))
    return run


def delete_run(session: Session, principal: Principal, run_id: str) -> None:
    """Put a tombstone on the run: later calls are told 410."""
    run = lock_run(session, principal, run_id)
    run.deleted_at_us = run.updated_at_us = now_us()


def _visible(run: Run | None, principal: Principal, run_id: str) -> Run:
    if run is None or not principal.sees(run.project):
        raise RunNotFound(f"there is no run {run_id}")
    if run.deleted_at_us is not None:
        raise RunDeleted(f"the run {run_id} was deleted")
    return run


def _key_of(run: RunRead) -> CursorKey:
    return (run.created_at_us, run.id)
