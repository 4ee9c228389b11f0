"""Checkpoints: announced by the run, found by probes."""

from __future__ import annotations

from typing import cast

from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes, parse
from foreshock.api.runs import CheckpointRecord
from foreshock.clock import now_us
from foreshock_service.platform.events import EventBus
from foreshock_service.platform.pagination import CursorKey, Page, decode_cursor, page_of
from foreshock_service.platform.security import Principal
from foreshock_service.runs.attempts.service import require_attempt
from foreshock_service.runs.checkpoints import repository
from foreshock_service.runs.checkpoints.schemas import CheckpointPut
from foreshock_service.runs.runs.service import get_run, lock_run, note_derived_model_kind
from foreshock_service.runs.step_key import StepKey


def announce_checkpoint(
    session: Session,
    events: EventBus,
    principal: Principal,
    key: StepKey,
    body: CheckpointPut,
) -> tuple[CheckpointRecord, bool]:
    """Store the location of a step's weights, overwriting an older announcement; also return True if it is the first.

    The model kind in the announcement applies to the run unless the run declares another one.
    """
    run = lock_run(session, principal, key.run_id)
    require_attempt(session, key.run_id, key.attempt)
    row = {**key._asdict(), "announced_at_us": now_us(), **body.model_dump()}
    created = repository.put(session, row)
    note_derived_model_kind(session, events, run, body.model_kind)
    return parse(CheckpointRecord, row), created


def list_checkpoints(
    session: Session, principal: Principal, run_id: str, cursor: str | None, limit: int
) -> Page[CheckpointRecord]:
    """Return one page of a run's checkpoints, by step."""
    get_run(session, principal, run_id)
    after = cast("tuple[int, int]", decode_cursor(cursor, (int, int))) if cursor is not None else (-1, -1)
    rows = repository.page_of_run(session, run_id, after, limit + 1)
    return page_of([from_attributes(CheckpointRecord, row) for row in rows], limit, _key_of)


def _key_of(checkpoint: CheckpointRecord) -> CursorKey:
    return (checkpoint.step, checkpoint.attempt)
