"""Versions of what trainers poll: a number each for advice and alerts, read for many runs by two queries."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import BindParameter, bindparam, func, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import table_of
from foreshock_service.platform.database.tables import AdviceDecision, Alert, Run, TrainerProgress

_runs, _decisions, _alerts = table_of(Run).c, table_of(AdviceDecision).c, table_of(Alert).c
_progress = table_of(TrainerProgress).c
_OF_RUNS: BindParameter[str] = bindparam("run_ids", expanding=True)
# Each is the end of an index's range.
_REVISION = select(func.max(_decisions.revision)).where(_decisions.run_id == _runs.id).scalar_subquery()
_ATTEMPT = (
    select(_decisions.attempt)
    .where(_decisions.run_id == _runs.id)
    .order_by(_decisions.revision.desc())
    .limit(1)
    .scalar_subquery()
)
_ALERTS = select(func.max(_alerts.version)).where(_alerts.run_id == _runs.id).scalar_subquery()
_VERSIONS = select(_runs.id, _runs.project, _runs.deleted_at_us, _ATTEMPT, _REVISION, _ALERTS).where(
    _runs.id.in_(_OF_RUNS)
)
_POLLED = select(_progress.run_id, _progress.attempt, _progress.polled_step).where(_progress.run_id.in_(_OF_RUNS))


@dataclass(frozen=True, slots=True)
class RunVersion:
    """What polls of a run wait for a change of: (attempt, revision) of the advice, and the version of the alerts."""

    project: str
    deleted_at_us: int | None
    attempt: int
    revision: int
    alerts: int
    # The newest step that a following trainer of this attempt asked for; −1 before any.
    polled_step: int

    @property
    def of_advice(self) -> str:
        """Return the version that the entity tag of the advice begins with."""
        return f"{self.attempt}-{self.revision}-{self.alerts}"

    @property
    def of_alerts(self) -> str:
        """Return the version that the entity tag of the alerts begins with."""
        return str(self.alerts)


def read_versions(session: Session, run_ids: Collection[str]) -> dict[str, RunVersion]:
    """Return the version of each of these runs that exists, deleted ones included."""
    parameters = {"run_ids": list(run_ids)}
    polled = {(run_id, attempt): step for run_id, attempt, step in session.execute(_POLLED, parameters)}
    versions = {}
    for run_id, project, deleted_at_us, attempt, revision, alerts in session.execute(_VERSIONS, parameters):
        # As `fold` has them before any decision.
        attempt = 1 if attempt is None else attempt
        step = polled.get((run_id, attempt), -1)
        versions[run_id] = RunVersion(project, deleted_at_us, attempt, revision or 0, alerts or 0, step)
    return versions
