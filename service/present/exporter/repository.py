"""The exporter's queries: a constant number for any number of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, false, func, or_, select, true
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from service.platform.database.tables import (
    AdviceAcknowledgement,
    Alert,
    Attempt,
    MeasurementStatistics,
    Run,
    Step,
    measurements,
)
from service.platform.database.tables.probes import Attribution, Lease, Probe, ProbeJob
from service.replay.probes.job_transitions import FAILURES, JobState
from service.runs.step_key import StepKey

# Shown for jobs that any worker may do.
ANY_ACCELERATOR = "any"
_KEYS_AT_ONCE = 100
# The comparisons that a trainer logs. All others come from replayed scores.
LOGGED = (STEP_ROW, TRAINER_ROLLOUT)

ComparisonKey = tuple[str, int, int, str]


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """A running run, the time of its newest data, and the totals of its data (None and 0: none yet)."""

    run: Run
    last_ingest_us: int | None
    rollouts: int
    tokens: int


def runs_by_state(session: Session, project: str | None) -> Mapping[str, int]:
    """Return the number of runs in each state."""
    query = select(Run.state, func.count()).where(_visible(project)).group_by(Run.state)
    return dict(session.execute(query).all())


def active_runs(session: Session, project: str | None, limit: int) -> list[ActiveRun]:
    """Return up to `limit` running runs, those with the newest data first."""
    arrived = (
        select(
            Step.run_id,
            func.max(Step.last_shard_at_us).label("last"),
            func.sum(Step.rollouts).label("rollouts"),
            func.sum(Step.tokens).label("tokens"),
        )
        .join(Run, Run.id == Step.run_id)
        .where(_visible(project), Run.state == "running")
        .group_by(Step.run_id)
        .subquery()
    )
    newest = func.coalesce(arrived.c.last, Run.created_at_us)
    query = (
        select(Run, arrived.c.last, arrived.c.rollouts, arrived.c.tokens)
        .outerjoin(arrived, arrived.c.run_id == Run.id)
        .where(_visible(project), Run.state == "running")
        .order_by(newest.desc(), Run.id)
        .limit(limit)
    )
    return [
        ActiveRun(run, last, int(rollouts or 0), int(tokens or 0))
        for run, last, rollouts, tokens in session.execute(query)
    ]


def newest_closed_steps(session: Session, run_ids: Collection[str]) -> dict[str, Step]:
    """Return the newest closed step of each run, in its newest attempt that has one."""
    step = select(Step.step).where(Step.closed_at_us.is_not(None))
    step = step.where(Step.run_id == Attempt.run_id, Step.attempt == Attempt.attempt)
    newest = {key.run_id: key for key in _newest_of_attempts(session, run_ids, step.order_by(Step.step.desc()))}
    same = [and_(*map(eq, (Step.run_id, Step.attempt, Step.step), key)) for key in newest.values()]
    return {each.run_id: each for each in session.scalars(select(Step).where(or_(false(), *same)))}


def newest_comparisons(session: Session, run_ids: Collection[str]) -> list[ComparisonKey]:
    """Return the newest step of each run and comparison, in the newest attempt that has it.

    Long runs have thousands of steps, few of which were replayed: no query reads all of them.
    """
    table = measurements.c
    newest: dict[tuple[str, str], ComparisonKey] = {}
    for comparison in LOGGED:
        step = select(table.step).where(table.comparison == comparison)
        step = step.where(table.run_id == Attempt.run_id, table.attempt == Attempt.attempt)
        for key in _newest_of_attempts(session, run_ids, step.order_by(table.step.desc())):
            newest[key.run_id, comparison] = (*key, comparison)
    of_replayed = and_(
        table.run_id == Attribution.run_id,
        table.attempt == Attribution.attempt,
        table.step == Attribution.step,
        table.comparison.not_in(LOGGED),
    )
    query = (
        select(Attribution.run_id, Attribution.attempt, func.max(table.step), table.comparison)
        .select_from(Attribution)
        # An outer join: SQLite would begin an inner one with the measurements of all steps.
        .outerjoin(measurements, of_replayed)
        .where(Attribution.run_id.in_(run_ids))
        .group_by(Attribution.run_id, Attribution.attempt, table.comparison)
        .order_by(Attribution.attempt)
    )
    for run_id, attempt, found, comparison in session.execute(query):
        if comparison is not None:
            newest[run_id, comparison] = (run_id, attempt, found, comparison)
    return sorted(newest.values())


def values_of(session: Session, keys: Sequence[ComparisonKey], columns: Sequence[str]) -> dict[ComparisonKey, Row[Any]]:
    """Return some columns of these rows of the wide table, and when they were computed (`computed_at_us`)."""
    table = measurements.c
    key = (table.run_id, table.attempt, table.step, table.comparison)
    query = select(*key, table.computed_at_us, *(table[name] for name in columns))
    rows: dict[ComparisonKey, Row[Any]] = {}
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        # Not (a, b) IN (…): SQLite reads the whole table for a list of rows.
        chosen = [and_(*map(eq, key, each)) for each in keys[start : start + _KEYS_AT_ONCE]]
        for row in session.execute(query.where(or_(*chosen))):
            rows[row.run_id, row.attempt, row.step, row.comparison] = row
    return rows


def statistics_of(session: Session, key: ComparisonKey) -> bytes | None:
    """Return the statistics blob of a measurement; None if there is none of this release's version."""
    found = session.get(MeasurementStatistics, key)
    return found.statistics if found is not None and found.statistics_version == STATISTICS_VERSION else None


def newest_attributions(session: Session, run_ids: Collection[str]) -> dict[str, Attribution]:
    """Return the newest attribution of each run that was computed."""
    computed = Attribution.computed_at_us.is_not(None)
    newest = (
        select(Attribution.run_id, Attribution.attempt, func.max(Attribution.step).label("step"))
        .where(Attribution.run_id.in_(run_ids), computed)
        .group_by(Attribution.run_id, Attribution.attempt)
        .subquery()
    )
    same = and_(
        Attribution.run_id == newest.c.run_id,
        Attribution.attempt == newest.c.attempt,
        Attribution.step == newest.c.step,
    )
    query = select(Attribution).join(newest, same).order_by(Attribution.attempt)
    return {each.run_id: each for each in session.scalars(query)}


def open_alerts(session: Session, run_ids: Collection[str]) -> Sequence[tuple[str, str, str, int]]:
    """Return (run, rule, severity, number) of the open alerts."""
    of_alert = (Alert.run_id, Alert.rule, Alert.severity)
    query = select(*of_alert, func.count()).where(Alert.run_id.in_(run_ids), Alert.state == "open")
    return session.execute(query.group_by(*of_alert)).all()


def newest_acknowledgements(session: Session, run_ids: Collection[str]) -> dict[str, AdviceAcknowledgement]:
    """Return the newest acknowledgement of each run's trainer."""
    newest = (
        select(
            AdviceAcknowledgement.run_id, AdviceAcknowledgement.attempt, func.max(AdviceAcknowledgement.step).label("s")
        )
        .where(AdviceAcknowledgement.run_id.in_(run_ids))
        .group_by(AdviceAcknowledgement.run_id, AdviceAcknowledgement.attempt)
        .subquery()
    )
    same = and_(
        AdviceAcknowledgement.run_id == newest.c.run_id,
        AdviceAcknowledgement.attempt == newest.c.attempt,
        AdviceAcknowledgement.step == newest.c.s,
    )
    query = select(AdviceAcknowledgement).join(newest, same).order_by(AdviceAcknowledgement.attempt)
    return {each.run_id: each for each in session.scalars(query)}


def jobs_by_state(session: Session, project: str | None) -> Sequence[tuple[str, str, int, int]]:
    """Return (accelerator, state, number, when the oldest was queued) of probe jobs; deleted runs are left out."""
    accelerator = func.coalesce(ProbeJob.accelerator, ANY_ACCELERATOR)
    query = (
        select(accelerator, ProbeJob.state, func.count(), func.min(ProbeJob.queued_at_us))
        .join(Probe)
        .join(Run, Run.id == Probe.run_id)
        .where(_visible(project))
        .group_by(accelerator, ProbeJob.state)
    )
    return session.execute(query).all()


def failures_by_accelerator(session: Session, project: str | None) -> Mapping[str, int]:
    """Return the number of tries that failed or whose lease expired, by the accelerator of the worker."""
    query = select(Lease.accelerator, func.count()).join(ProbeJob, ProbeJob.id == Lease.job_id)
    query = query.join(Probe).join(Run, Run.id == Probe.run_id).where(Lease.outcome.in_(FAILURES))
    if project is not None:
        query = query.where(Run.project == project)
    return dict(session.execute(query.group_by(Lease.accelerator)).all())


def is_waiting(state: str) -> bool:
    """Return whether a job in this state waits for a worker."""
    return state == JobState.QUEUED


def _newest_of_attempts(session: Session, run_ids: Collection[str], step: Select[Any]) -> Iterator[StepKey]:
    """Yield the first row of `step`, a query on the steps of an attempt, for each attempt of the runs, in order."""
    newest = step.correlate(Attempt).limit(1).scalar_subquery()
    query = select(Attempt.run_id, Attempt.attempt, newest).where(Attempt.run_id.in_(run_ids))
    for run_id, attempt, found in session.execute(query.order_by(Attempt.attempt)):
        if found is not None:
            yield StepKey(run_id, attempt, found)


def _visible(project: str | None) -> ColumnElement[bool]:
    return Run.deleted_at_us.is_(None) & (true() if project is None else Run.project == project)
