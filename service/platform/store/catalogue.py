"""Which files of the store the catalogue names: the rows of shards, scores and exact divergences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from foreshock_service.platform.database.tables import Shard
from foreshock_service.platform.database.tables.exact import ExactShard
from foreshock_service.platform.database.tables.probes import ScoreShard
from foreshock_service.platform.store.names import FileName

Item = TypeVar("Item")
# SQLite allows 32,766 parameters of a statement.
_JOBS_AT_ONCE = 500


def files_in_catalogue(session: Session, names: Mapping[str, FileName]) -> set[str]:
    """Return those of these files that a row names, by the rows' primary keys: `file` has no index."""
    return _of_shards(session, names.values()) | _of_jobs(session, names.values())


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of at most `size`."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _of_shards(session: Session, names: Iterable[FileName]) -> set[str]:
    steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name in names:
        if name.shard is not None:
            steps[name.run_id].append((name.attempt, name.step))
    found: set[str] = set()
    place = tuple_(Shard.attempt, Shard.step)
    for run_id, places in steps.items():
        query = select(Shard.file).where(Shard.run_id == run_id, place >= min(places), place <= max(places))
        found.update(session.scalars(query))
    return found


def _of_jobs(session: Session, names: Iterable[FileName]) -> set[str]:
    jobs: dict[type[ScoreShard] | type[ExactShard], set[str]] = {ScoreShard: set(), ExactShard: set()}
    for name in names:
        if name.job_id is not None:
            jobs[ScoreShard if name.kind == "scores" else ExactShard].add(name.job_id)
    found: set[str] = set()
    for table, ids in jobs.items():
        for some in batches(sorted(ids), _JOBS_AT_ONCE):
            found.update(session.scalars(select(table.file).where(table.job_id.in_(some))))
    return found
