"""The risk of runs, from the alerts that stand: an ordinal level."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, cast

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api.watch import RiskRecord
from foreshock.diagnosis.risk import LEVELS, NO_PROBABILITY, Risk, RiskLevel, StandingAlert, assess
from foreshock.severity import Severity
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Alert, Run
from foreshock_service.platform.security import Reader
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.runs.runs import get_run
from foreshock_service.watch.alerts.service import standing_of_runs
from foreshock_service.watch.detection.states import observed_steps

router = APIRouter(prefix="/v1/runs/{run}/risk", tags=["alerts"])

MOST_SEARCHED = 1000
"""Runs with standing alerts whose risk one search computes."""

# `assess` gives a level above "watch" to warnings and critical alerts only.
_LEAST: Final[Mapping[RiskLevel, Sequence[Severity]]] = {
    "watch": ("info", "warning", "critical"),
    "elevated": ("warning", "critical"),
    "high": ("warning", "critical"),
    "critical": ("critical",),
}


class RunsAtRisk(NamedTuple):
    """The ids of runs; `searched_all` is false if there are more runs with alerts than one search looks at."""

    run_ids: tuple[str, ...]
    searched_all: bool


@router.get("")
def read_risk(run: RunIdentifier, context: Context, principal: Reader) -> RiskRecord:
    """Return an ordinal level, calm to critical, with its reasons: the alerts that stand, by family."""
    with context.database.read() as session:
        get_run(session, principal, run)
        risk, step = risks_of_runs(session, [run])[run], observed_steps(session, [run]).get(run)
    return RiskRecord(
        level=risk.level, score=risk.score, reasons=tuple(risk.reasons), note=NO_PROBABILITY, observed_step=step
    )


def risks_of_runs(
    session: Session, run_ids: Sequence[str], observed: Mapping[str, int] | None = None
) -> Mapping[str, Risk]:
    """Return the risk of each run, in two queries, or one if its newest observed step is passed."""
    alerts: dict[str, list[StandingAlert]] = {run_id: [] for run_id in run_ids}
    for run_id, rule, severity, step in standing_of_runs(session, run_ids):
        alerts[run_id].append(StandingAlert(rule, cast(Severity, severity), step))
    steps = observed_steps(session, run_ids) if observed is None else observed
    return {run_id: assess(of_run, steps.get(run_id)) for run_id, of_run in alerts.items()}


def runs_at_risk(session: Session, projects: Sequence[str], level: RiskLevel) -> RunsAtRisk:
    """Return the runs of at least this level, of the newest MOST_SEARCHED that have alerts, in three queries.

    The project must equal all of `projects`. Raises ValueError for "calm", which every run has at least.
    """
    if level == "calm":
        raise ValueError("level must be one of watch, elevated, high, critical, got 'calm'")
    found = _newest_with_standing_alerts(session, projects, _LEAST[level], MOST_SEARCHED + 1)
    searched = found[:MOST_SEARCHED]
    risks = risks_of_runs(session, searched)
    chosen = tuple(run_id for run_id in searched if risks[run_id].score >= LEVELS.index(level))
    return RunsAtRisk(chosen, len(found) <= MOST_SEARCHED)


def _newest_with_standing_alerts(
    session: Session, projects: Collection[str], severities: Collection[str], limit: int
) -> Sequence[str]:
    """Return the ids of up to `limit` runs that have an open or acknowledged alert of these severities, newest first.

    The project must equal all of `projects`.
    """
    standing = select(Alert.run_id).where(
        Alert.run_id == Run.id, Alert.state.in_(("open", "acknowledged")), Alert.severity.in_(severities)
    )
    query = select(Run.id).where(Run.deleted_at_us.is_(None), standing.exists())
    query = query.where(*(Run.project == project for project in projects))
    return session.scalars(query.order_by(Run.created_at_us.desc(), Run.id.desc()).limit(limit)).all()
