"""The doctor in the service: the reports of its examinations, and the causes that they name."""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from foreshock.api import doctor, records, runs
from foreshock.diagnosis.wording import as_sentence
from foreshock.doctor.findings import explained, fix_of
from foreshock_service.platform import parameters
from foreshock_service.platform.database.tables import Probe, ProbeResult
from foreshock_service.replay.results.documents import DOCTOR
from foreshock_service.runs import attempts, events, findings, weights

router = parameters.api_router(prefix="/v1")

_MOST_STEPS = 200
"""The newest reports of a run, which are read for its causes."""


@router.get("/runs/{run}/steps/{step}/doctor", tags=["doctor"])
def read_report(asked: attempts.StepOfRequest) -> doctor.DoctorStepRecord:
    """Return the newest report of the doctor on a step: found, tried and not named, not tried, and the price.

    404 `result-not-found`: the step was not examined; request a probe of the kind `doctor`.
    """
    _, found = DOCTOR.of_step(asked)
    with asked.context.database.read() as session:
        return report_record(session, *found[0])


def report_record(session: Session, row: ProbeResult, probe: Probe) -> doctor.DoctorStepRecord:
    """Return a stored report as it is shown."""
    return doctor.DoctorStepRecord(
        run=row.run_id,
        attempt=row.attempt,
        step=row.step,
        probe=probe.id,
        from_sample=probe.from_sample,
        published_at_us=row.published_at_us or 0,
        report=records.parse(doctor.DoctorReport, row.document),
        checksums=weights.checksums_of_step(session, events.StepKey(row.run_id, row.attempt, row.step)),
    )


def causes_of_run(session: Session, run_id: str) -> list[findings.Finding]:
    """Return the causes named by the newest reports of active steps, each with its newest sentence."""
    query = (
        DOCTOR.published(ProbeResult.run_id == run_id)
        .order_by(None)
        .order_by(ProbeResult.step.desc(), ProbeResult.published_at_us.desc(), ProbeResult.job_id)
    )
    reports: dict[int, tuple[Mapping[str, object], tuple[str, ...]]] = {}
    for row in session.scalars(query.limit(_MOST_STEPS)):
        key = events.StepKey(run_id, row.attempt, row.step)
        if attempts.is_active(session, key):
            reports.setdefault(row.step, (row.document, weights.checksums_of_step(session, key)))
    return findings.newest_of_steps(
        (step, [_finding(cause, checksums) for cause in records.parse(doctor.DoctorReport, document).causes])
        for step, (document, checksums) in reports.items()
    )


def _finding(cause: doctor.Finding, checksums: Sequence[str]) -> findings.Finding:
    sentence = ": ".join(filter(None, (cause.sentence, explained(cause))))
    if cause.side == "rollout" and checksums:
        sentence += f"; checksums: {' '.join(checksums)}"
    return findings.Finding(
        name=f"{cause.cause}/{cause.side}",
        severity="info",
        title=cause.sentence.rstrip("."),
        sentence=as_sentence(sentence),
        remedy=fix_of(cause) or None,
        confidence=runs.ConfidenceRecord(share=cause.share, low=cause.share_low, high=cause.share_high),
    )


def newest_report(session: Session, *of: ColumnElement[bool]) -> doctor.DoctorStepRecord | None:
    """Return the newest published report for which these conditions on its row hold."""
    found = session.execute(DOCTOR.published(*of).limit(1)).first()
    return None if found is None else report_record(session, *found)
