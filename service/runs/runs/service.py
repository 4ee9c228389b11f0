"""Runs: get or create, list, change, delete (a tombstone stays)."""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol, TypeVar, cast

from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.runs import RunRecord
from foreshock.clock import now_us
from foreshock.errors import RUN_NOT_FOUND
from foreshock.model_kind import ModelKind
from foreshock_service.platform.audit import record
from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.database.tables.base import new_identifier
from foreshock_service.platform.parameters import CursorKey, Page, decode_cursor, page_of
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal, ScopeMissing
from foreshock_service.runs.events import (
    AdviceModeChanged,
    ModelKindChanged,
    RunBecameStale,
    RunRemoved,
    ScalarNamesChanged,
)
from foreshock_service.runs.runs import repository
from foreshock_service.runs.runs.schemas import RunCreate, RunFilter, RunUpdate


class FoundRun(Protocol):
    """A run, or a part of one."""

    @property
    def project(self) -> str:
        """Return the project that it belongs to."""
        ...

    @property
    def deleted_at_us(self) -> int | None:
        """Return when it was deleted; None: it was not."""
        ...


RunFound = TypeVar("RunFound", bound=FoundRun)

# Projects that an error lists.
_MOST_PROJECTS = 10
# Fields that change rules or advice: their changes are recorded in the audit.
_AUDITED = ("advice_mode", "declared_model_kind", "scalar_names")


class RunNotFound(ProblemError):
    """Missing run: none with this id or key is visible to this API key."""

    status = 404
    problem_type = RUN_NOT_FOUND


class RunDeleted(ProblemError):
    """Deleted run: it accepts no data and returns none."""

    status = 410
    problem_type = "run-deleted"


class RunKeyAmbiguous(ProblemError):
    """A run key without its project that several visible projects have."""

    status = 409
    problem_type = "run-key-ambiguous"


def get_run(session: Session, principal: Principal, run_id: str) -> Run:
    """Return the run if the principal may see it; raise RunNotFound or RunDeleted."""
    return check_visible(repository.find(session, run_id), principal, run_id)


def find_run(session: Session, run_id: str) -> Run | None:
    """Return the run, deleted or not; None if it does not exist."""
    return repository.find(session, run_id)


def check_visible(run: RunFound | None, principal: Principal, run_id: str) -> RunFound:
    """Return what was found of a run if the principal may see it; raise RunNotFound or RunDeleted."""
    if run is None or not principal.sees(run.project):
        raise _not_found(run_id)
    if run.deleted_at_us is not None:
        raise _deleted(run_id)
    return run


def check_run(session: Session, principal: Principal, run_id: str) -> None:
    """Raise RunNotFound or RunDeleted as `get_run` does."""
    found = repository.find_access(session, run_id)
    if found is None or not principal.sees(found[0]):
        raise _not_found(run_id)
    if found[1] is not None:
        raise _deleted(run_id)


def id_of_key(session: Session, principal: Principal, project: str | None, key: str) -> str:
    """Return the id of the run with this key, in `project` or in the one visible project that has it.

    Raises RunNotFound for runs of projects that the principal may not see as for runs that do not exist.
    """
    if principal.project is not None and project is None:
        project = principal.project
    if project is not None:
        found = [run] if (run := repository.find_by_key(session, project, key)) is not None else []
    else:
        found = list(repository.find_all_by_key(session, key, _MOST_PROJECTS))
        found = [run for run in found if run.deleted_at_us is None] or found[:1]
    if len(found) > 1:
        projects = ", ".join(run.project for run in found)
        raise RunKeyAmbiguous(f"several projects have a run {key}: add ?project= with one of {projects}")
    return check_visible(found[0] if found else None, principal, key).id


def lock_run(session: Session, principal: Principal, run_id: str) -> Run:
    """Return the run as `get_run` does, and lock it until this transaction ends.

    Steps of a run close one after the other, so that observers see them in one order.
    """
    return check_visible(repository.find_and_lock(session, run_id), principal, run_id)


def lock_run_for_background(session: Session, run_id: str) -> Run | None:
    """Lock the run for work of the service itself; return None if the run does not exist or is deleted."""
    run = repository.find_and_lock(session, run_id)
    return run if run is not None and run.deleted_at_us is None else None


def get_or_create_run(session: Session, events: EventBus, principal: Principal, body: RunCreate) -> tuple[Run, bool]:
    """Return the run of (project, key), and True if it is new. Raises RunDeleted if that key was deleted before.

    An existing run is changed only by adding a model kind if it has none.
    """
    if not principal.sees(body.project):
        raise ScopeMissing(f"this key is bound to another project than {body.project!r}")
    now = now_us()
    row = {
        "id": new_identifier("run"),
        "state": "running",
        "last_step": None,
        "rollouts": 0,
        "tokens": 0,
        "last_shard_at_us": None,
        "seen_at_us": None,
        "created_at_us": now,
        "updated_at_us": now,
        "deleted_at_us": None,
        "derived_model_kind": None,
        **body.model_dump(exclude={"model_kind"}),
        "declared_model_kind": body.model_kind,
    }
    created = insert_if_absent(session, Run, row)
    run = repository.find_by_key(session, body.project, body.key)
    assert run is not None
    if run.deleted_at_us is not None:
        raise RunDeleted(f"the run with key {body.key!r} was deleted: choose another key")
    if not created and body.model_kind is not None and run.declared_model_kind is None:
        run = lock_run(session, principal, run.id)
        _set_model_kind(session, events, run, "declared_model_kind", body.model_kind)
    return run, created


def list_runs(session: Session, chosen: RunFilter, cursor: str | None, limit: int) -> Page[RunRecord]:
    """Return one page of the chosen runs, newest first."""
    after = cast("tuple[int, str]", decode_cursor(cursor, (int, str))) if cursor is not None else None
    runs = repository.newest_first(session, chosen, after, limit + 1)
    return page_of([from_attributes(RunRecord, run) for run in runs], limit, _key_of)


def update_run(session: Session, events: EventBus, principal: Principal, run_id: str, changes: RunUpdate) -> Run:
    """Change the fields that `changes` sets."""
    run = lock_run(session, principal, run_id)
    before = {name: getattr(run, name) for name in _AUDITED}
    mode_before = run.advice_mode
    for name, value in changes.model_dump(exclude_unset=True, exclude={"model_kind", "scalar_names"}).items():
        if value is not None or name == "name":
            setattr(run, name, value)
    run.updated_at_us = now_us()
    if run.advice_mode != mode_before:
        events.publish(session, AdviceModeChanged(run_id, run.advice_mode))
    if "model_kind" in changes.model_fields_set:
        _set_model_kind(session, events, run, "declared_model_kind", changes.model_kind)
    if "scalar_names" in changes.model_fields_set and run.scalar_names != changes.scalar_names:
        run.scalar_names = changes.scalar_names
        session.flush()
        events.publish(session, ScalarNamesChanged(run_id))
    changed = {name: getattr(run, name) for name in _AUDITED if getattr(run, name) != before[name]}
    if changed:
        before = {name: before[name] for name in changed}
        record(
            session, principal, "run.update", run.id,
            project=run.project, run_id=run.id, before=before, after=changed,
        )  # fmt: skip
    return run


def note_sign_of_life(run: Run, *, resumed: bool = False) -> None:
    """Note that a client of the run lives; `resumed`: it starts an attempt, after whatever end. The run is locked."""
    run.seen_at_us = now_us()
    if resumed or run.state == "stale":
        run.state = "running"


def note_upload(session: Session, run: Run, step: int, rollouts: int, tokens: int) -> None:
    """Note that rollouts of a step arrived: the newest step and totals of the run, and that its client lives.

    The run is locked.

    Runs whose clients send no heartbeats have no sign of life.
    """
    newest = step if run.last_step is None else max(run.last_step, step)
    totals = {
        "rollouts": run.rollouts + rollouts,
        "tokens": run.tokens + tokens,
        "last_shard_at_us": now_us(),
    }
    if run.seen_at_us is None:
        repository.note_upload(session, run, last_step=newest, **totals)
    else:
        state = "running" if run.state == "stale" else run.state
        repository.note_upload(session, run, last_step=newest, seen_at_us=now_us(), state=state, **totals)


def mark_stale_runs(context: ServiceContext, counted_from_us: int) -> int:
    """Mark the running runs that gave no sign of life for `stale_seconds`; return how many.

    Nothing is stale earlier than that after `counted_from_us`, when this process began to listen.
    """
    before = now_us() - int(context.settings.stale_seconds * 1e6)
    if before < counted_from_us:
        return 0
    with context.database.read() as session:
        found = repository.silent(session, before)
    return context.database.write(partial(_mark_stale, context, before)) if found else 0


def _mark_stale(context: ServiceContext, before_us: int, session: Session) -> int:
    stale = repository.set_stale(session, before_us)
    for run_id, last_step in stale:
        context.events.publish(session, RunBecameStale(run_id, last_step, context.settings.stale_seconds))
    return len(stale)


def model_kind_of(session: Session, run_id: str) -> ModelKind | None:
    """Return the kind of the run's model; None if it is unknown."""
    run = repository.find(session, run_id)
    return None if run is None else run.model_kind


def note_derived_model_kind(session: Session, events: EventBus, run: Run, model_kind: ModelKind | None) -> None:
    """Store the model kind of an announced checkpoint; None changes nothing. The run is locked."""
    if model_kind is not None:
        _set_model_kind(session, events, run, "derived_model_kind", model_kind)


def delete_run(session: Session, events: EventBus, principal: Principal, run_id: str) -> None:
    """Put a tombstone on the run: later calls return 410, and its rows and files are removed in the background."""
    run = lock_run(session, principal, run_id)
    run.deleted_at_us = run.updated_at_us = now_us()
    before = {"key": run.key, "state": run.state, "last_step": run.last_step}
    record(session, principal, "run.delete", run.id, project=run.project, run_id=run.id, before=before)
    events.publish(session, RunRemoved(run_id))


def _set_model_kind(
    session: Session,
    events: EventBus,
    run: Run,
    column: Literal["declared_model_kind", "derived_model_kind"],
    model_kind: ModelKind | None,
) -> None:
    """Set a column and publish ModelKindChanged if the run's effective kind changes. The run is locked."""
    before = run.model_kind
    setattr(run, column, model_kind)
    run.updated_at_us = now_us()
    session.flush()
    if run.model_kind != before:
        events.publish(session, ModelKindChanged(run.id, run.model_kind))


def _not_found(run_id: str) -> RunNotFound:
    return RunNotFound(f"there is no run {run_id}")


def _deleted(run_id: str) -> RunDeleted:
    return RunDeleted(f"the run {run_id} was deleted")


def _key_of(run: RunRecord) -> CursorKey:
    return (run.created_at_us, run.id)
