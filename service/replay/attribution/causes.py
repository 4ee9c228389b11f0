"""The causes that the attributions of a run name: the conclusions on each step, as a reader of the step gets them."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock.diagnosis.attribution import conclude_attribution
from foreshock.diagnosis.conclusion import AttributionEvidence, Conclusion, ConclusionKind
from foreshock.interval_names import interval_name
from foreshock.json_values import finite_or_none
from foreshock_service.replay.attribution import repository
from foreshock_service.replay.attribution.evidence import evidence_of
from foreshock_service.replay.attribution.schemas import AttributionDocument
from foreshock_service.replay.attribution.service import DRIFT_STEPS
from foreshock_service.replay.weights.service import find_search
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.runs.findings.schemas import ConfidenceRead, FindingOfStep, FindingOfSteps
from foreshock_service.runs.findings.service import of_steps
from foreshock_service.runs.step_key import StepKey

MOST_STEPS = 200
"""Attributed steps of a run that are read, the newest: one takes about a millisecond."""

_TITLES: dict[ConclusionKind, str] = {
    "wrong-weights": "the engine did not run with the announced weights",
    "trainer-precision": "the trainer computes in float32 and its replay does not",
}


def causes_of_run(session: Session, run_id: str) -> list[FindingOfSteps]:
    """Return the causes that the newest attributions of active steps name, each with its newest sentence."""
    rows = repository.newest_documents(session, run_id, attempts_of_run(session, run_id), MOST_STEPS)
    read = [(key, AttributionDocument(**stored) if stored is not None else None) for key, stored in rows]
    newest: dict[str, FindingOfStep] = {}
    steps: dict[str, list[int]] = {}
    for place, (key, document) in enumerate(read):
        if document is None:
            continue
        others = [*read[: min(place, DRIFT_STEPS)], *read[place + 1 :]][:DRIFT_STEPS]
        earlier = [other for _, other in reversed(others) if other is not None]
        for cause in _causes_of_step(session, key, document, earlier):
            newest.setdefault(cause.name, cause)
            steps.setdefault(cause.name, []).insert(0, key.step)
    return [of_steps(steps[name], [cause.severity], cause) for name, cause in newest.items()]


def _causes_of_step(
    session: Session, key: StepKey, document: AttributionDocument, earlier: list[AttributionDocument]
) -> list[FindingOfStep]:
    """Return the causes that the step's conclusions name. Exact divergences name none, so they are not read."""
    evidence = evidence_of(document, earlier=earlier, weights_search=find_search(session, key))
    return [_finding(evidence, each) for each in conclude_attribution(evidence) if each.names_cause]


def _finding(evidence: AttributionEvidence, cause: Conclusion) -> FindingOfStep:
    link = next((link for link in evidence.links if link.name == cause.link), None)
    if cause.kind != "cause" or link is None:
        return FindingOfStep(cause.kind, "info", _TITLES.get(cause.kind, cause.kind), cause.sentence)
    share, low, high = map(finite_or_none, (link.share, link.share_low, link.share_high))
    confidence = ConfidenceRead(share=share, low=low, high=high, interval=interval_name(evidence.reliable))
    return FindingOfStep(link.name, "info", link.short_cause, cause.sentence, confidence=confidence)
