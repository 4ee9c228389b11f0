"""The doctor in the service: the reports of its examinations, and the causes that they name."""

from collections.abc import Mapping, Sequence

from fastapi import status
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api import doctor, records, runs
from foreshock.diagnosis.wording import as_sentence
from foreshock.doctor.findings import explained, fix_of
from foreshock.probe_kinds import DOCTOR
from foreshock_service.platform import parameters, security
from foreshock_service.platform.context import Context
from foreshock_service.platform.database.tables import Probe, ProbeJob, ProbeResult
from foreshock_service.replay.leases.endpoints import LeaseIdentifier, LeaseToken
from foreshock_service.replay.results.documents import DocumentKind
from foreshock_service.runs import attempts, events, findings, weights

router = parameters.api_router(prefix="/v1")

MOST_FINDINGS = 32
MOST_VARIANTS = 4_000
_LONGEST_TEXT = 2_000
_MOST_STEPS = 200
"""The newest reports of a run, which are read for its causes."""


def _check(body: doctor.DoctorReport, job: ProbeJob, probe: Probe) -> str | None:
    if body.tokens != probe.tokens:  # rollouts without a token are left out
        return f"got a report on {body.tokens} tokens, expected one on the {probe.tokens} of the job"
    if len(body.findings) > MOST_FINDINGS or len(body.ruled_out) + len(body.not_tried) > MOST_VARIANTS:
        return f"a report has at most {MOST_FINDINGS} findings and {MOST_VARIANTS} other variants"
    texts = [body.ended, *(text for each in body.not_tried for text in (each.variant, each.why))]
    texts += [each.variant for each in body.ruled_out]
    texts += [text for each in body.findings for text in (each.sentence, each.value, each.cause, each.side)]
    if any(len(text) > _LONGEST_TEXT for text in texts):
        return f"texts of a report have at most {_LONGEST_TEXT} characters"
    return None


KIND = DocumentKind(probe=DOCTOR, noun="examination by the doctor", check=_check, findings="doctor")


@router.put("/leases/{lease}/doctor", status_code=status.HTTP_204_NO_CONTENT, tags=["leases"])
def put_report(
    lease: LeaseIdentifier, token: LeaseToken, body: doctor.DoctorReport, context: Context, principal: security.Worker
) -> None:
    """Store a report of the doctor; it counts when the job is complete."""
    KIND.store(context, principal, lease, token, body)


@router.get("/runs/{run}/steps/{step}/doctor", tags=["doctor"])
def read_report(asked: attempts.StepOfRequest) -> doctor.DoctorStepRecord:
    """Return the newest report of the doctor on a step: found, tried and not named, not tried, and the price.

    404 `result-not-found`: the step was not examined; request a probe of the kind `doctor`.
    """
    _, found = KIND.of_step(asked, 1)
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


def causes_of_run(session: Session, run_id: str) -> list[findings.FindingOfSteps]:
    """Return the causes named by the newest reports of active steps, each with its newest sentence."""
    query = select(ProbeResult).where(ProbeResult.run_id == run_id, ProbeResult.kind == DOCTOR.name)
    query = query.where(ProbeResult.published_at_us.is_not(None))
    order = (ProbeResult.step.desc(), ProbeResult.published_at_us.desc(), ProbeResult.job_id)
    reports: dict[int, tuple[Mapping[str, object], tuple[str, ...]]] = {}
    for row in session.scalars(query.order_by(*order).limit(_MOST_STEPS)):
        key = events.StepKey(run_id, row.attempt, row.step)
        if attempts.is_active(session, key):
            reports.setdefault(row.step, (row.document, weights.checksums_of_step(session, key)))
    return findings.newest_of_steps(
        (step, [_finding(cause, checksums) for cause in records.parse(doctor.DoctorReport, document).causes])
        for step, (document, checksums) in reports.items()
    )


def _finding(cause: doctor.Finding, checksums: Sequence[str]) -> findings.FindingOfStep:
    sentence = ": ".join(filter(None, (cause.sentence, explained(cause))))
    if cause.side == "rollout" and checksums:
        sentence += f"; checksums: {' '.join(checksums)}"
    return findings.FindingOfStep(
        name=f"{cause.cause}/{cause.side}",
        severity="info",
        title=cause.sentence.rstrip("."),
        sentence=as_sentence(sentence),
        remedy=fix_of(cause) or None,
        confidence=runs.ConfidenceRecord(share=cause.share, low=cause.share_low, high=cause.share_high),
    )


def newest_of_run(session: Session, run_id: str) -> Sequence[doctor.DoctorStepRecord]:
    """Return the report of the newest examined step of a run, as a list of at most one."""
    query = select(ProbeResult, Probe).join(ProbeJob, ProbeJob.id == ProbeResult.job_id).join(Probe)
    query = query.where(ProbeResult.run_id == run_id, ProbeResult.kind == DOCTOR.name)
    query = query.where(ProbeResult.published_at_us.is_not(None)).order_by(ProbeResult.published_at_us.desc()).limit(1)
    return [report_record(session, row, probe) for row, probe in session.execute(query)]
