"""Queries on score shards and published scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import insert_if_absent, table_of, upsert
from foreshock_service.platform.database.prepared import Prepared
from foreshock_service.platform.database.tables.probes import Score, ScoreShard

_scores = table_of(Score).c
_ANY = Prepared(
    select(_scores.scorer).where(*(_scores[name] == bindparam(name) for name in ("run_id", "attempt", "step"))).limit(1)
)
SCORE_KEY = ("run_id", "attempt", "step", "rollout_set_digest", "scorer", "fingerprint_digest", "variant")


def find_shard(session: Session, job_id: str, token: int, scorer: str, variant: str, shard: int) -> ScoreShard | None:
    """Return the catalogue row of a score shard."""
    return session.get(ScoreShard, (job_id, token, scorer, variant, shard))


def add_shard(session: Session, row: dict[str, Any]) -> bool:
    """Add a catalogue row, the commit point of an upload; False if the shard is stored already."""
    return insert_if_absent(session, ScoreShard, row)


def shards_of_try(session: Session, job_id: str, token: int) -> Sequence[ScoreShard]:
    """Return the shards that one try of a job has sent, ordered by scorer, variant and shard."""
    query = select(ScoreShard).where(ScoreShard.job_id == job_id, ScoreShard.token == token)
    return session.scalars(query.order_by(ScoreShard.scorer, ScoreShard.variant, ScoreShard.shard)).all()


def publish(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Insert published scores; a score with an equal key then points at its newest shards."""
    upsert(session, Score, rows, SCORE_KEY)


def any_of_step(session: Session, run_id: str, attempt: int, step: int) -> bool:
    """Return whether a score of a step is published."""
    return _ANY.first(session, {"run_id": run_id, "attempt": attempt, "step": step}) is not None


def of_step(session: Session, run_id: str, attempt: int, step: int) -> Sequence[Score]:
    """Return the published scores of a step, newest first."""
    query = select(Score).where(Score.run_id == run_id, Score.attempt == attempt, Score.step == step)
    order = (Score.published_at_us.desc(), Score.rollouts.desc(), Score.fingerprint_digest)
    return session.scalars(query.order_by(*order).execution_options(populate_existing=True)).all()


def shards_of_score(session: Session, score: Score) -> Sequence[ScoreShard]:
    """Return the shards that hold a score's log-probs, in order."""
    query = select(ScoreShard).where(
        ScoreShard.job_id == score.job_id,
        ScoreShard.token == score.token,
        ScoreShard.scorer == score.scorer,
        ScoreShard.variant == score.variant,
    )
    return session.scalars(query.order_by(ScoreShard.shard)).all()
