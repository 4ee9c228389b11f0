"""The stored diagnosis of each run: `watch/diagnosis.py` writes it, everything else renders it."""

from collections.abc import Collection

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock.api import diagnosis, records
from foreshock.clock import now_us
from foreshock.diagnosis.diagnose import JUDGE_VERSION, diagnose
from foreshock.diagnosis.history import History
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run, StoredDiagnosis

NOTHING_YET = diagnose(History())
"""The diagnosis of a run without data."""


def find_diagnosis(session: Session, run_id: str) -> diagnosis.Diagnosis | None:
    """Return the stored diagnosis; None if none is stored yet, or if it is of a release with another form."""
    stored = session.get(StoredDiagnosis, run_id, populate_existing=True)
    try:
        return None if stored is None else diagnosis.diagnosis_of(stored.document)
    except Exception:
        return None


def verdicts_of_runs(session: Session, run_ids: Collection[str]) -> dict[str, diagnosis.RunVerdict]:
    """Return the verdict and headline of each run, in one query; a run without a row counts as one without data."""
    table = StoredDiagnosis
    query = select(
        table.run_id, table.verdict, table.since_step, table.headline, table.short, table.observed_step, table.revision
    ).where(table.run_id.in_(run_ids))
    found = dict.fromkeys(run_ids, NOTHING_YET.summary)
    for row in session.execute(query):
        found[row.run_id] = records.from_attributes(diagnosis.RunVerdict, row, since=row.since_step)
    return found


def store_diagnosis(
    session: Session, run_id: str, found: diagnosis.Diagnosis, *, awaits_shards: bool, quiet: bool = False
) -> bool:
    """Store a diagnosis and return True; False if the stored one says the same. The run is locked.

    Nobody is told of another verdict if it is `quiet`, or the first one of this release's judge.
    """
    document = records.to_json(found)
    before = session.get(StoredDiagnosis, run_id, populate_existing=True)
    revision = verdict_revision = 1
    if before is not None:
        unchanged = {**document, "revision": before.revision, "computed_at_us": before.changed_at_us}
        same = before.document == unchanged
        if same and before.awaits_shards == awaits_shards and before.judged_by == JUDGE_VERSION:
            return False
        revision = verdict_revision = before.revision + (not same)
        quiet = quiet or before.judged_by != JUDGE_VERSION
        if found.verdict == before.verdict:
            verdict_revision, quiet = before.verdict_revision, before.quiet
    at_us = now_us()
    row = {
        "run_id": run_id,
        "revision": revision,
        "verdict": found.verdict,
        "verdict_revision": verdict_revision,
        "since_step": found.since,
        "headline": found.headline,
        "short": found.short,
        "observed_step": found.observed_step,
        "awaits_shards": awaits_shards,
        "judged_by": JUDGE_VERSION,
        "document": document | {"revision": revision, "computed_at_us": at_us},
        "changed_at_us": at_us,
        "quiet": quiet,
    }
    upsert(session, StoredDiagnosis, [row], ("run_id",))
    return True


def awaits_shards(session: Session, run_id: str) -> bool:
    """Return whether a shard that arrives may change the diagnosis: it names missing ones, or no step is complete."""
    query = select(StoredDiagnosis.awaits_shards, StoredDiagnosis.observed_step)
    found = session.execute(query.where(StoredDiagnosis.run_id == run_id)).first()
    return found is None or found[0] or found[1] is None


def has_verdict(verdict: diagnosis.Verdict) -> ColumnElement[bool]:
    """Return the condition that a run has this verdict; a run without a stored diagnosis is "unknown"."""
    stored = select(StoredDiagnosis.run_id).where(StoredDiagnosis.run_id == Run.id)
    if verdict == "unknown":
        return ~stored.where(StoredDiagnosis.verdict != verdict).exists()
    return stored.where(StoredDiagnosis.verdict == verdict).exists()
