"""The errors of all kinds of results, and results that are one JSON document: stored by try, published with the job.

Documents of all kinds are rows of one table. A document that is sent again replaces the first one. Each kind is a file
in this folder with its name, a `KIND` and a `router` of its two routes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from foreshock.api import records, runs
from foreshock.probe_kinds import ProbeKind
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import of_step, upsert
from foreshock_service.platform.database.tables import Probe, ProbeJob, ProbeResult
from foreshock_service.replay.leases.service import hold
from foreshock_service.runs import attempts, events
from foreshock_service.runs.due import mark

Body = TypeVar("Body")
# Most documents of a step that are read, newest first.
_MOST_READ = 100


class ResultNotAsked(problem.ProblemError, status=422, problem_type="result-not-asked"):
    """The job does not request this result, or it is of another step, other scorers or other weights than the job."""


class ResultNotFound(problem.ProblemError, status=404, problem_type="result-not-found"):
    """No result of this kind is done for the step: request one with a probe of that kind."""


class ResultIncomplete(problem.ProblemError, status=409, problem_type="result-incomplete"):
    """The job is not complete: a result was not sent, or lacks some rollouts."""


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[Body]):
    """A kind of probe whose result is a document.

    `probe` is the kind of its probes, `noun` its name in messages. `check` returns why a document does not belong to
    its job, None if it does. `asked` returns whether a job has such a result. `pair` returns the comparison that a
    document measures.
    """

    probe: ProbeKind
    noun: str
    check: Callable[[Body, ProbeJob, Probe], str | None]
    asked: Callable[[ProbeJob], bool] = lambda job: True
    pair: Callable[[Body], str] = lambda body: ""
    findings: runs.FindingSource | None = None

    def store(
        self, context: ServiceContext, principal: security.Principal, lease_id: str, token: int, body: Body
    ) -> None:
        """Store the document of a leased job. Raises LeaseNotFound, LeaseLost, ResultNotAsked, InvalidRequest."""
        document = body.model_dump(mode="json") if isinstance(body, BaseModel) else records.to_json(body)
        try:
            parameters.storable_json(document)
        except ValueError as error:
            raise problem.InvalidRequest(f"body: {error}") from error

        def store(session: Session) -> None:
            _, job, probe = hold(session, principal, lease_id, token)
            if probe.kind != self.probe.name:
                raise ResultNotAsked(f"the job is of a probe of the kind {probe.kind!r}, expected {self.probe.name!r}")
            why = self.check(body, job, probe)
            if why is not None:
                raise ResultNotAsked(why)
            row = {
                "job_id": job.id,
                "token": token,
                "run_id": probe.run_id,
                "attempt": probe.attempt,
                "step": probe.step,
                "kind": probe.kind,
                "pair": self.pair(body),
                "document": document,
                "published_at_us": None,
            }
            upsert(session, ProbeResult, [row], ("job_id", "token"))

        context.database.write(store)

    def publish(self, session: Session, job: ProbeJob, probe: Probe, token: int, now_us: int) -> None:
        """Publish the document of a try. Raises ResultIncomplete if it was not sent."""
        same = (ProbeResult.job_id == job.id, ProbeResult.token == token)
        query = update(ProbeResult).where(*same).values(published_at_us=now_us).returning(ProbeResult.job_id)
        if session.scalar(query) is None:
            raise ResultIncomplete(
                f"the {self.noun} is missing: send it with PUT /v1/leases/{{lease}}/{self.probe.name}, then complete"
            )
        if self.findings is not None:
            mark(session, probe.run_id, source=self.findings)

    def newest(
        self, session: Session, key: events.StepKey, limit: int = _MOST_READ, pair: str | None = None
    ) -> list[tuple[ProbeResult, Probe]]:
        """Return at most `limit` published documents of a step with their probes, newest first."""
        query = select(ProbeResult, Probe).join(ProbeJob, ProbeJob.id == ProbeResult.job_id).join(Probe)
        query = query.where(of_step(ProbeResult, key))
        if pair is not None:
            query = query.where(ProbeResult.pair == pair)
        query = query.where(ProbeResult.kind == self.probe.name, ProbeResult.published_at_us.is_not(None))
        order = (ProbeResult.published_at_us.desc(), ProbeResult.job_id)
        return [(row, probe) for row, probe in session.execute(query.order_by(*order).limit(limit))]

    def of_step(
        self, asked: attempts.AskedStep, most: int, pair: str | None = None
    ) -> tuple[events.StepKey, list[tuple[ProbeResult, Probe]]]:
        """Return the newest document of each pair at a step, at most `most` of them.

        Raises ResultNotFound, RunNotFound, RunDeleted.
        """
        with asked.context.database.read() as session:
            key = attempts.key_of(session, asked)
            found: dict[str, tuple[ProbeResult, Probe]] = {}
            for row, probe in self.newest(session, key, pair=pair):
                found.setdefault(row.pair, (row, probe))
        if not found:
            raise ResultNotFound(
                f"no {self.noun} of step {key.step} of attempt {key.attempt} is done: request one with "
                f"foreshock probe {key.run_id} {key.step} --{self.probe.name}"
            )
        return key, list(found.values())[:most]


def foreign_weights(fingerprints: Iterable[Mapping[str, Any]], probe: Probe) -> str | None:
    """Return why fingerprints do not match the probe's weights; None if no fingerprint names other weights."""
    expected = probe.checkpoint["digest"]
    used = (fingerprint.get("weights_digest") for fingerprint in fingerprints)
    other = next((digest for digest in used if digest not in (None, expected)), None)
    return None if other is None else f"a fingerprint has the weights {other}, expected {expected}, those of the probe"
