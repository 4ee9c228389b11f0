"""Shared parts of the maintenance commands: opening the service's data, and reading and rewriting stored files."""

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import ColumnElement, Select, or_, select, tuple_
from sqlalchemy.orm import Session

from foreshock import errors, rollouts
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import parquet_files
from foreshock_service.platform import context, uploads
from foreshock_service.platform.database import engine, opening
from foreshock_service.platform.database.tables import Probe, ProbeJob, Run, Step
from foreshock_service.platform.decoding import pool, worker
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import StoredFile, open_store
from foreshock_service.runs import deletions, events, shard_decoding


@contextmanager
def maintenance_context(settings: Settings, shared: pool.DecoderPool | None = None) -> Iterator[context.ServiceContext]:
    """Open the parts of a service for a command; raises ConfigurationError if data is missing or of another release.

    There are no event handlers. `shared` is a pool of decoders to use; without it the command has its own pool.
    """
    store = open_store(settings)
    with opening.existing_database(settings.database_url) as database:
        store.check_exists()
        decoders = shared or pool.DecoderPool(settings, shard_decoding.PRELOAD)
        try:
            yield context.ServiceContext(settings, database, store, decoders, b"", uploads.UploadPlaces(1))
        finally:
            if shared is None:
                decoders.close()


def run_called(session: Session, name: str) -> Run:
    """Return the only run with this id, key or name that was not deleted; raises ConfigurationError."""
    called = or_(Run.id == name, Run.key == name, Run.name == name)
    runs = session.scalars(select(Run).where(called, Run.deleted_at_us.is_(None)).order_by(Run.created_at_us)).all()
    if not runs:
        raise errors.ConfigurationError(f"there is no run {name}")
    if len(runs) > 1:
        raise errors.ConfigurationError(f"more than one run is called {name}: {', '.join(run.id for run in runs)}")
    return runs[0]


def jobs_of_step(key: events.StepKey) -> Select[str]:
    """Return the query for the ids of the probe jobs of a step."""
    return select(ProbeJob.id).join(Probe, Probe.id == ProbeJob.probe_id).where(engine.of_step(Probe, key))


def steps_beyond(
    session: Session, run_id: str, place: tuple[int, int], limit: int, *conditions: ColumnElement[bool]
) -> list[events.StepKey]:
    """Return the next `limit` steps of a run beyond (attempt, step) for which the conditions hold, in order."""
    order = (Step.attempt, Step.step)
    query = select(Step.run_id, *order).where(Step.run_id == run_id, tuple_(*order) > place, *conditions)
    return [events.StepKey(*row) for row in session.execute(query.order_by(*order).limit(limit))]


@dataclass(frozen=True, slots=True)
class FoundRollouts:
    """The deleted rollouts of a token file, and the sample ids of the others."""

    deleted: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StrippedFile:
    """What a rewritten file holds; no file is written for 0 rollouts. `sampled` of them are the unbiased sample."""

    rollouts: int
    tokens: int
    sampled: int
    file_bytes: int


def find_rollouts(file: StoredFile, ids: deletions.DeletedIds) -> FoundRollouts:
    """Find the deleted rollouts of a file; reads two columns. Raises FileNotFoundError, RolloutsError if damaged."""
    with parquet_files.arrow_errors(), file.open() as source:
        parquet = pq.ParquetFile(source, page_checksum_verification=True)
        names = [name for name in ("sample_id", "group_id") if name in parquet.schema_arrow.names]
        table = parquet.read(columns=names)
    samples = table.column("sample_id").to_pylist()
    groups = table.column("group_id").to_pylist() if "group_id" in names else None
    rows = ids.rows(samples, groups)
    deleted = tuple(sample for sample, gone in zip(samples, rows, strict=True) if gone)
    return FoundRollouts(deleted, tuple(sample for sample, gone in zip(samples, rows, strict=True) if not gone))


def strip_rollouts(file: StoredFile, target: Path, ids: deletions.DeletedIds, sampled: int | None) -> StrippedFile:
    """Write the rollouts of a token file that are not deleted; raises as `find_rollouts`.

    The first `sampled` rollouts of the file are an unbiased sample; None: all of them.
    """
    batch = rollouts.decode_rollouts(file.read_bytes(), worker.stored_limits())
    rows = np.flatnonzero(~np.array(ids.rows(batch.sample_ids, batch.group_ids)))
    of_sample = int(rows.size if sampled is None else (rows < sampled).sum())
    if not rows.size:
        return StrippedFile(0, 0, 0, 0)
    chosen = batch.select(rows)
    data = rollouts.encode_rollouts(chosen)
    target.write_bytes(data)
    return StrippedFile(chosen.num_rollouts, chosen.num_tokens, of_sample, len(data))


def strip_scores(file: StoredFile, target: Path, kept: frozenset[str], *, exact: bool) -> StrippedFile:
    """Write the kept rollouts of a file of scores or exact divergences; raises as `find_rollouts`."""
    data = file.read_bytes()
    batch: Any = (
        rollouts.decode_exact(data, worker.stored_limits())
        if exact
        else rollouts.decode_scores(data, worker.stored_limits())
    )
    rows = [row for row, sample in enumerate(batch.sample_ids) if sample in kept]
    if not rows:
        return StrippedFile(0, 0, 0, 0)
    lengths = np.diff(batch.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(batch.offsets.dtype)
    tokens = np.concatenate([np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in rows])
    arrays = {
        field.name: getattr(batch, field.name)[tokens]
        for field in fields(batch)
        if field.name != "offsets" and isinstance(getattr(batch, field.name), np.ndarray)
    }
    chosen = replace(batch, sample_ids=[batch.sample_ids[row] for row in rows], offsets=offsets, **arrays)
    written = rollouts.encode_exact(chosen) if exact else rollouts.encode_scores(chosen)
    target.write_bytes(written)
    return StrippedFile(len(rows), int(offsets[-1]), len(rows), len(written))


def anonymise_summaries(
    summaries: bytes, ids: deletions.DeletedIds, secret: bytes
) -> tuple[frozenset[str], bytes] | None:
    """Replace the ids of deleted rollouts, and of deleted groups, by pseudonyms; None if there are none.

    Returns the sample ids of deleted rollouts and the changed summaries. Equal ids get equal pseudonyms under one
    secret, so that the rows of a group stay together.
    """
    table = RolloutSummaries.from_bytes(summaries).table
    samples, groups = table.column("sample_id").to_pylist(), table.column("group_id").to_pylist()
    rows = ids.rows(samples, groups)
    if not any(rows):
        return None
    deleted = frozenset(sample for sample, gone in zip(samples, rows, strict=True) if gone)
    samples = [_pseudonym(secret, text) if gone else text for text, gone in zip(samples, rows, strict=True)]
    groups = [_pseudonym(secret, text) if ids.has_group(text) else text for text in groups]
    for name, values in (("sample_id", samples), ("group_id", groups)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, pa.string()))
    return deleted, RolloutSummaries(table).to_bytes()


def strip_examples(examples: Mapping[str, Any], deleted: frozenset[str]) -> dict[str, Any]:
    """Return the lint's examples by check without those of deleted rollouts."""
    return {name: [each for each in found if each["sample_id"] not in deleted] for name, found in examples.items()}


def strip_report(report: Mapping[str, Any], deleted: frozenset[str]) -> dict[str, Any]:
    """Return the lint's report on a step without examples of deleted rollouts."""
    warnings: Sequence[Mapping[str, Any]] = report.get("warnings", ())
    kept = [
        {**each, "where": [place for place in each.get("where", ()) if place["sample_id"] not in deleted]}
        for each in warnings
    ]
    return {**report, "warnings": kept}


def strip_document(document: Any, deleted: frozenset[str]) -> Any:
    """Return the result of a probe without deleted rollouts in its lists of `sample_ids`."""
    if isinstance(document, Mapping):
        return {
            name: [each for each in value if each not in deleted]
            if name == "sample_ids" and isinstance(value, list)
            else strip_document(value, deleted)
            for name, value in document.items()
        }
    return [strip_document(each, deleted) for each in document] if isinstance(document, list) else document


def _pseudonym(secret: bytes, text: str | None) -> str | None:
    if text is None:
        return None
    return "deleted-" + hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()[:16]
