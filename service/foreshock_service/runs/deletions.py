"""Deletions: requests to delete rollouts of a run by their ids, of which only digests are kept.

`service/foreshock_service/maintenance/delete_rollouts.py` carries them out. A deletion stays in
force: if a shard arrives later, its step is searched again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import status
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import ColumnElement, case, or_, select, update
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.runs import DeletionRecord
from foreshock.clock import now_us
from foreshock_service.platform import audit, parameters, problem, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Deletion, new_identifier
from foreshock_service.runs import events, run_endpoints, runs

router = parameters.api_router(prefix="/v1/runs/{run}/deletions", tags=["deletions"])


_Id = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class DeletionCreate(BaseModel):
    """Rollouts to delete: those with one of these sample ids, and those of one of these prompt groups."""

    model_config = ConfigDict(extra="forbid")

    sample_ids: list[_Id] = Field(default_factory=list, max_length=10_000)
    group_ids: list[_Id] = Field(default_factory=list, max_length=10_000)


@router.post("", status_code=status.HTTP_202_ACCEPTED)
def request_deletion(
    run: run_endpoints.RunIdentifier, body: DeletionCreate, context: Context, principal: security.Administrator
) -> DeletionRecord:
    """Delete the tokens of rollouts by sample or group id, now and when they are sent again; aggregates stay."""
    made = context.database.write(lambda session: store_deletion(session, principal, run, body))
    return deletion_record(made)


@router.get("")
def list_deletions(
    run: run_endpoints.RunIdentifier,
    context: Context,
    principal: security.Administrator,
    cursor: parameters.Cursor = None,
    limit: parameters.Limit = 50,
) -> parameters.Page[DeletionRecord]:
    """List the deletions of the run, newest first, and how far they are."""
    with context.database.read() as session:
        runs.get_run(session, principal, run)
        keys, query = (Deletion.requested_at_us, Deletion.id), select(Deletion).where(Deletion.run_id == run)
        return parameters.page_of_query(
            session, query, keys, cursor, limit, lambda rows: [deletion_record(row) for (row,) in rows]
        )


@dataclass(frozen=True, slots=True)
class DeletedIds:
    """Digests of the sample ids and group ids of a run whose rollouts are deleted."""

    run_id: str
    samples: frozenset[str]
    groups: frozenset[str]

    @classmethod
    def of(cls, run_id: str, sample_ids: Iterable[str], group_ids: Iterable[str]) -> DeletedIds:
        """Return the digests of these ids."""
        digests = [frozenset(_digest(run_id, text) for text in ids) for ids in (sample_ids, group_ids)]
        return cls(run_id, *digests)

    def rows(self, sample_ids: Sequence[str | None], group_ids: Sequence[str | None] | None) -> list[bool]:
        """Return for each rollout whether it is deleted, by its own id or by that of its group."""
        groups = group_ids if group_ids is not None else [None] * len(sample_ids)
        known = {group: self._has(self.groups, group) for group in set(groups)}
        return [
            self._has(self.samples, sample) or known[group] for sample, group in zip(sample_ids, groups, strict=True)
        ]

    def has_group(self, group_id: str | None) -> bool:
        """Return whether the rollouts of a group are deleted."""
        return self._has(self.groups, group_id)

    def _has(self, digests: frozenset[str], text: str | None) -> bool:
        return bool(digests) and text is not None and _digest(self.run_id, text) in digests


def _digest(run_id: str, text: str) -> str:
    # Includes the run's random id, so that equal ids in two runs have different digests.
    return hashlib.sha256(f"{run_id}\0{text}".encode()).hexdigest()


def store_deletion(session: Session, principal: security.Principal, run_id: str, body: DeletionCreate) -> Deletion:
    """Store the request; the rollouts are deleted later. Raises InvalidRequest if no id is given, RunDeleted."""
    if not body.sample_ids and not body.group_ids:
        raise problem.InvalidRequest("body: name at least one id in sample_ids or group_ids")
    run = runs.lock_run(session, principal, run_id)
    ids = DeletedIds.of(run_id, body.sample_ids, body.group_ids)
    run.deletions += 1
    deletion = Deletion(
        id=new_identifier("deletion"), run_id=run_id, sample_digests=sorted(ids.samples),
        group_digests=sorted(ids.groups), attempt=0, step=-1, steps=0, rollouts=0, files=0, requested_at_us=now_us(),
        finished_at_us=None,
    )  # fmt: skip
    session.add(deletion)
    asked = {"sample_ids": len(ids.samples), "group_ids": len(ids.groups)}
    audit.record(session, principal, "rollouts.delete", deletion.id, project=run.project, run_id=run_id, after=asked)
    session.flush()
    return deletion


def deletion_record(row: Deletion) -> DeletionRecord:
    """Return a deletion as the API shows it."""
    state = "running" if row.finished_at_us is None else "done"
    asked = {"sample_ids": len(row.sample_digests), "group_ids": len(row.group_digests)}
    return from_attributes(DeletionRecord, row, state=state, **asked)


def search_step_again(session: Session, key: events.StepKey) -> None:
    """Make the run's deletions search a step again, because it got rollouts. The run is locked."""
    beyond: ColumnElement[bool] = or_(
        Deletion.attempt > key.attempt, (Deletion.attempt == key.attempt) & (Deletion.step > key.step - 1)
    )
    session.execute(
        update(Deletion)
        .where(Deletion.run_id == key.run_id)
        .values(
            finished_at_us=None,
            step=case((beyond, key.step - 1), else_=Deletion.step),
            attempt=case((beyond, key.attempt), else_=Deletion.attempt),
        )
    )
