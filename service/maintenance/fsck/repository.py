"""Queries on every catalogue row that names a file, page by page in the order of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Run, Shard
from foreshock_service.platform.database.tables.probes import ExactShard, Probe, ProbeJob, ScoreShard

_ROWS_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class CataloguedFile:
    """A file that a row names, and what the row says of it; None: it does not say.

    `key` is that of a shard of rollouts: run, attempt, step, shard. `purged`: the run was deleted or retention purged
    the tokens, so that the file may be gone.
    """

    kind: str
    name: str
    owner: str
    digest: str
    rollouts: int | None
    tokens: int | None
    size: int | None
    rollout_set_digest: str | None
    purged: bool
    key: tuple[str, int, int, int] | None = None


def catalogued_files(database: Database) -> Iterator[list[CataloguedFile]]:
    """Yield the files of all rows: shards of rollouts, then scores, then exact divergences."""
    shard = (Shard.run_id, Shard.attempt, Shard.step, Shard.shard)
    of_runs = select(Shard, Run.deleted_at_us).join(Run, Run.id == Shard.run_id)
    yield from _pages(database, of_runs, shard, _of_shard)
    score = (ScoreShard.job_id, ScoreShard.token, ScoreShard.scorer, ScoreShard.variant, ScoreShard.shard)
    yield from _pages(database, _with_run(ScoreShard), score, _of_score)
    exact = (ExactShard.job_id, ExactShard.token, ExactShard.pair, ExactShard.shard)
    yield from _pages(database, _with_run(ExactShard), exact, _of_exact)


def _with_run(table: type[ScoreShard] | type[ExactShard]) -> Select[*tuple[Any, ...]]:
    query = select(table, Run.deleted_at_us, Probe.run_id, Probe.attempt, Probe.step)
    query = query.join(ProbeJob, ProbeJob.id == table.job_id).join(Probe, Probe.id == ProbeJob.probe_id)
    return query.join(Run, Run.id == Probe.run_id)


def _pages(
    database: Database,
    query: Select[*tuple[Any, ...]],
    key: Sequence[InstrumentedAttribute[Any]],
    read: Callable[[Row[Any]], CataloguedFile],
) -> Iterator[list[CataloguedFile]]:
    names = [column.key for column in key]
    after: tuple[Any, ...] | None = None
    while True:
        chosen = query if after is None else query.where(tuple_(*key) > after)
        with database.read() as session:
            rows = session.execute(chosen.order_by(*key).limit(_ROWS_AT_ONCE)).all()
            page = [read(row) for row in rows]
        if not page:
            return
        after = tuple(getattr(rows[-1][0], name) for name in names)
        yield page


def _of_shard(row: Row[Any]) -> CataloguedFile:
    shard: Shard = row[0]
    in_full = shard.full_rollouts is None
    return CataloguedFile(
        kind="rollouts",
        name=shard.file,
        owner=f"run {shard.run_id}, attempt {shard.attempt}, step {shard.step}, shard {shard.shard}",
        digest=shard.digest,
        # The row keeps the numbers of the upload if rollouts of it were deleted.
        rollouts=None if shard.deleted_rollouts else (shard.rollouts if in_full else shard.full_rollouts),
        tokens=None if shard.deleted_rollouts else (shard.tokens if in_full else shard.full_tokens),
        size=shard.file_bytes,
        rollout_set_digest=shard.rollout_set_digest if in_full and not shard.deleted_rollouts else None,
        purged=row.deleted_at_us is not None or shard.tokens_removed is not None,
        key=(shard.run_id, shard.attempt, shard.step, shard.shard),
    )


def _of_score(row: Row[Any]) -> CataloguedFile:
    return _of_job(row, "scores", f"{row[0].scorer} {row[0].variant}".strip())


def _of_exact(row: Row[Any]) -> CataloguedFile:
    return _of_job(row, "exact", row[0].pair)


def _of_job(row: Row[Any], kind: str, what: str) -> CataloguedFile:
    shard: ScoreShard | ExactShard = row[0]
    return CataloguedFile(
        kind=kind,
        name=shard.file,
        owner=f"run {row.run_id}, attempt {row.attempt}, step {row.step}, {what}, shard {shard.shard}",
        digest=shard.digest,
        rollouts=shard.rollouts,
        tokens=shard.tokens,
        size=None,
        rollout_set_digest=None,
        purged=row.deleted_at_us is not None,
    )
