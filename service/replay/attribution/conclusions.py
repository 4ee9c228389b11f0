"""The evidence for conclusions from stored attributions, and the causes that the attributions of a run name."""

import math
from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from foreshock.api import attribution as answers
from foreshock.api import records, runs
from foreshock.diagnosis import attribution, conclusion
from foreshock.json_values import finite_or_none
from foreshock.model_kind import ModelKind
from foreshock_service.platform.database.tables import Attribution as StoredAttribution
from foreshock_service.replay.attribution.document import environment_in, newest_documents
from foreshock_service.runs import attempts, findings

DRIFT_STEPS = 20
"""Other probed steps that the conclusions compare a step with, the newest."""
MOST_STEPS = 200
"""Attributed steps of a run that are read, the newest: one takes about a millisecond."""

_TITLES: dict[conclusion.ConclusionKind, str] = {
    "trainer-precision": "the trainer computes in float32 and its replay does not",
}


def causes_of_run(session: Session, run_id: str) -> list[findings.FindingOfSteps]:
    """Return the causes that the newest attributions of active steps name, each with its newest sentence."""
    computed = StoredAttribution.computed_at_us.is_not(None)
    rows = newest_documents(session, run_id, attempts.attempts_of_run(session, run_id), MOST_STEPS, computed)
    read = [
        (key, records.parse(answers.AttributionDocument, stored) if stored is not None else None)
        for key, stored in rows
    ]
    found: list[tuple[int, list[findings.FindingOfStep]]] = []
    for place, (key, document) in enumerate(read):
        if document is None:
            continue
        others = [*read[: min(place, DRIFT_STEPS)], *read[place + 1 :]][:DRIFT_STEPS]
        earlier = [other for _, other in reversed(others) if other is not None]
        found.append((key.step, _causes_of_step(document, earlier)))
    return findings.newest_of_steps(found)


def _causes_of_step(
    document: answers.AttributionDocument, earlier: list[answers.AttributionDocument]
) -> list[findings.FindingOfStep]:
    """Return the causes that the step's conclusions name. Exact divergences name none, so they are not read."""
    evidence = evidence_of(document, earlier=earlier)
    return [_finding(evidence, each) for each in attribution.conclude_attribution(evidence) if each.names_cause]


def _finding(evidence: conclusion.AttributionEvidence, cause: conclusion.Conclusion) -> findings.FindingOfStep:
    link = next((link for link in evidence.links if link.name == cause.link), None)
    if cause.kind != "cause" or link is None:
        return findings.FindingOfStep(cause.kind, "info", _TITLES.get(cause.kind, cause.kind), cause.sentence)
    confidence = runs.ConfidenceRecord(share=link.share, low=link.share_low, high=link.share_high)
    return findings.FindingOfStep(link.name, "info", link.short_cause, cause.sentence, confidence=confidence)


def evidence_of(
    document: answers.AttributionDocument,
    *,
    earlier: Sequence[answers.AttributionDocument] = (),
    model_kind: ModelKind | None = None,
    exact: Sequence[answers.ExactOfLinkRecord] = (),
) -> conclusion.AttributionEvidence:
    """Return the evidence of a step; `earlier` are the attributions of the run's other probed steps, in step order."""
    branch = document.side_branch
    return records.from_attributes(
        conclusion.AttributionEvidence,
        document,
        links=tuple(map(_link, document.links)),
        whole=_link(document.whole),
        prompt_groups=document.groups,
        floors={floor.scorer: floor.k3_kl for floor in document.floors if math.isfinite(floor.k3_kl)},
        reference=_reference(branch) if branch is not None else None,
        drift=_drift(document, earlier),
        model_kind=model_kind,
        environments={
            name: environment_in(read) if read is not None else None for name, read in document.environments.items()
        },
        environment_links=tuple(map(_environment_link, document.environment_links)),
        exact=tuple(map(_exact, exact)),
    )


def _link(link: answers.LinkRecord) -> conclusion.LinkEvidence:
    return records.from_attributes(conclusion.LinkEvidence, link, excess_k3_kl=finite_or_none(link.excess_k3_kl))


def _reference(branch: answers.SideBranchRecord) -> conclusion.ReferenceEvidence:
    links = tuple(map(_link, branch.links))
    return records.from_attributes(conclusion.ReferenceEvidence, branch, links=links)


def _environment_link(link: answers.EnvironmentLinkRecord) -> conclusion.EnvironmentLinkEvidence:
    environments = {"first": environment_in(link.first), "second": environment_in(link.second)}
    return records.from_attributes(conclusion.EnvironmentLinkEvidence, link, **environments)


def _exact(read: answers.ExactOfLinkRecord) -> conclusion.ExactEvidence:
    return conclusion.ExactEvidence(
        link=read.pair,
        kl=read.kl.mean,
        kl_low=read.kl.low,
        kl_high=read.kl.high,
        tv=read.tv.mean,
        delta_max=read.delta_max,
        top1_flip=read.top1_flip.mean,
        k3_kl=read.k3_kl.mean,
        k3_low=read.k3_kl.low,
        k3_high=read.k3_kl.high,
        tokens=read.tokens,
        prompt_groups=read.groups,
        non_finite=read.non_finite,
        other_settings=read.other_settings,
    )


def _drift(
    now: answers.AttributionDocument, documents: Sequence[answers.AttributionDocument]
) -> Mapping[str, tuple[conclusion.DriftPoint, ...]]:
    found: dict[str, list[conclusion.DriftPoint]] = {}
    for document in documents:
        for link in document.links:
            if math.isfinite(link.k3_kl):
                same = document.attempt == now.attempt and all(
                    document.environments.get(name) == now.environments.get(name) for name in link.name.split("/")
                )
                found.setdefault(link.name, []).append(conclusion.DriftPoint(document.step, link.k3_kl, same))
    return {name: tuple(points) for name, points in found.items()}
