"""Queries on uploaded and published exact divergences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_if_absent, upsert
from foreshock_service.platform.database.tables.exact import ExactDivergence, ExactShard
from foreshock_service.runs.step_key import StepKey

KEY = (
    "run_id",
    "attempt",
    "step",
    "rollout_set_digest",
    "pair",
    "target_fingerprint_digest",
    "behaviour_fingerprint_digest",
)


def find_shard(session: Session, job_id: str, token: int, pair: str, shard: int) -> ExactShard | None:
    """Return the catalogue row of a shard."""
    return session.get(ExactShard, (job_id, token, pair, shard))


def add_shard(session: Session, row: dict[str, Any]) -> bool:
    """Add a catalogue row, the commit point of an upload; False if the shard is stored already."""
    return insert_if_absent(session, ExactShard, row)


def shards_of_try(session: Session, job_id: str, token: int) -> Sequence[ExactShard]:
    """Return the shards that one try of a job has sent, ordered by pair and shard."""
    query = select(ExactShard).where(ExactShard.job_id == job_id, ExactShard.token == token)
    return session.scalars(query.order_by(ExactShard.pair, ExactShard.shard)).all()


def publish(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Insert published divergences; those with an equal key then point at their newest shards."""
    upsert(session, ExactDivergence, rows, KEY)


def of_step(session: Session, key: StepKey) -> Sequence[ExactDivergence]:
    """Return the published divergences of a step, newest first."""
    query = select(ExactDivergence).filter_by(**key._asdict())
    order = (ExactDivergence.published_at_us.desc(), ExactDivergence.rollouts.desc(), ExactDivergence.job_id)
    return session.scalars(query.order_by(*order).execution_options(populate_existing=True)).all()


def shards_of(session: Session, published: ExactDivergence) -> Sequence[ExactShard]:
    """Return the shards that hold published divergences, in order."""
    query = select(ExactShard).filter_by(job_id=published.job_id, token=published.token, pair=published.pair)
    return session.scalars(query.order_by(ExactShard.shard)).all()


def replace_measures(session: Session, published: ExactDivergence, measures: Mapping[str, Any]) -> None:
    """Replace the measures of published divergences, unless another try has replaced them."""
    same = [getattr(ExactDivergence, name) == getattr(published, name) for name in (*KEY, "job_id", "token")]
    session.execute(update(ExactDivergence).where(*same).values(measures=dict(measures)))
