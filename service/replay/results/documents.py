"""Results that workers send as one JSON document for a job: kept by try, published with the job, read by step.

Each kind has a table of its own, with the columns of `StoredResult`. Sent again, a document replaces itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock.api.runs import FindingSource
from foreshock.probe_kinds import ProbeKind
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables.probes import (
    Probe,
    ProbeJob,
    StoredLayerComparison,
    StoredResult,
    StoredRouting,
)
from foreshock_service.platform.problem import ProblemError
from foreshock_service.platform.security import Principal
from foreshock_service.replay.leases.service import hold
from foreshock_service.runs.attempts import resolve_step
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.findings.service import mark_due
from foreshock_service.runs.runs import get_run

Row = TypeVar("Row", bound=StoredResult)
Body = TypeVar("Body", bound=BaseModel)
PairRow = TypeVar("PairRow", StoredLayerComparison, StoredRouting)


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[Row, Body]):
    """A kind of probe whose result is a document.

    `probe` is the kind of its probes, and `noun` what it is called.
    `check` returns why a document is not of its job, None if it is; `columns` returns the values of the table's own
    columns. `missing` and `wrong` are the errors for a job without a document, and for a document of another job.
    """

    probe: ProbeKind
    noun: str
    table: type[Row]
    check: Callable[[Body, ProbeJob, Probe], str | None]
    columns: Callable[[Body, Probe], dict[str, Any]]
    missing: type[ProblemError]
    wrong: type[ProblemError]
    findings: FindingSource | None = None

    def store(self, context: ServiceContext, principal: Principal, lease_id: str, token: int, body: Body) -> None:
        """Store the document of a leased job. Raises LeaseNotFound, LeaseLost, `wrong`."""
        context.database.write(lambda session: self._store(session, principal, lease_id, token, body))

    def publish(self, session: Session, job: ProbeJob, probe: Probe, token: int, now_us: int) -> None:
        """Have the document of a try count. Raises `missing` if it was not sent."""
        same = (self.table.job_id == job.id, self.table.token == token)
        query = update(self.table).where(*same).values(published_at_us=now_us).returning(self.table.job_id)
        if session.scalar(query) is None:
            raise self.missing(
                f"the {self.noun} is missing: send it with PUT /v1/leases/{{lease}}/{self.probe.document}, then "
                "complete"
            )
        if self.findings is not None:
            mark_due(session, probe.run_id, self.findings)

    def newest(self, session: Session, key: StepKey, limit: int, **equal: str) -> Sequence[Row]:
        """Return at most `limit` published documents of a step, newest first, those with these values of columns."""
        query = select(self.table).filter_by(**key._asdict(), **equal).where(self.table.published_at_us.is_not(None))
        order = (self.table.published_at_us.desc(), self.table.job_id)
        return session.scalars(query.order_by(*order).limit(limit)).all()

    def _store(self, session: Session, principal: Principal, lease_id: str, token: int, body: Body) -> None:
        _, job, probe = hold(session, principal, lease_id, token)
        if probe.kind != self.probe.name:
            raise self.wrong(f"the job is of a probe of the kind {probe.kind!r}, expected {self.probe.name!r}")
        why = self.check(body, job, probe)
        if why is not None:
            raise self.wrong(why)
        row = {
            "job_id": job.id,
            "token": token,
            "run_id": probe.run_id,
            "attempt": probe.attempt,
            "step": probe.step,
            **self.columns(body, probe),
            "document": body.model_dump(mode="json"),
            "published_at_us": None,
        }
        upsert(session, self.table, [row], ("job_id", "token"))


def visible_step(session: Session, principal: Principal, run_id: str, step: int, attempt: int | None) -> StepKey:
    """Return the key of a step that the principal may see. Raises RunNotFound, RunDeleted."""
    get_run(session, principal, run_id)
    return resolve_step(session, run_id, step, attempt)


def newest_by_pair(rows: Iterable[PairRow], most: int) -> list[PairRow]:
    """Return the first row of each pair, at most `most` of them."""
    newest: dict[str, PairRow] = {}
    for row in rows:
        newest.setdefault(row.pair, row)
    return list(newest.values())[:most]


def foreign_weights(fingerprints: Iterable[Mapping[str, Any]], probe: Probe) -> str | None:
    """Return the first digest of weights in fingerprints that is not that of the probe; None if there is none."""
    used = (fingerprint.get("weights_digest") for fingerprint in fingerprints)
    return next((digest for digest in used if digest not in (None, probe.checkpoint["digest"])), None)
