"""Queries on the cells of a step's matrix."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.configuration_grid import MATRIX_KIND
from foreshock_service.platform.database.tables.probes import Lease, Probe, ProbeJob, ScoreShard
from foreshock_service.runs.step_key import StepKey


def newest_cells(session: Session, key: StepKey, most: int) -> list[tuple[Probe, ProbeJob]]:
    """Return up to `most` cells of a step with their jobs, the newest first."""
    query = select(Probe, ProbeJob).join(ProbeJob, ProbeJob.probe_id == Probe.id)
    query = query.where(Probe.run_id == key.run_id, Probe.attempt == key.attempt, Probe.step == key.step)
    query = query.where(Probe.kind == MATRIX_KIND)
    rows = session.execute(query.order_by(Probe.created_at_us.desc(), Probe.id.desc()).limit(most))
    return [(probe, job) for probe, job in rows]


def shards_of_jobs(session: Session, job_ids: Collection[str]) -> Sequence[ScoreShard]:
    """Return the score shards of jobs, of the newest try of each."""
    query = select(ScoreShard).join(ProbeJob, ProbeJob.id == ScoreShard.job_id)
    query = query.where(ScoreShard.job_id.in_(job_ids), ScoreShard.token == ProbeJob.fencing_token)
    return session.scalars(query.order_by(ScoreShard.job_id, ScoreShard.shard)).all()


def newest_leases(session: Session, job_ids: Collection[str]) -> dict[str, Lease]:
    """Return the lease of the newest try of each job, by job id."""
    query = select(Lease).join(ProbeJob, ProbeJob.id == Lease.job_id)
    query = query.where(Lease.job_id.in_(job_ids), Lease.token == ProbeJob.fencing_token)
    return {lease.job_id: lease for lease in session.scalars(query)}
