"""The document of an attribution: make it, store it, and read the causes of a run from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock.api import attribution as answers
from foreshock.api import replays, runs
from foreshock.api.records import from_attributes, parse
from foreshock.diagnosis import attribution, conclusion
from foreshock.environment import Environment
from foreshock.measures.estimators.attribution import METHOD, Attribution
from foreshock_service.platform.database import engine, tables
from foreshock_service.replay.attribution.compute import AttributionResult, environment_record, excess_over_floors
from foreshock_service.replay.probes.environments import declared_precision, precision_in_words
from foreshock_service.runs import attempts, events, findings


def document_of(
    key: events.StepKey,
    attribution: Attribution,
    result: AttributionResult,
    scores: Sequence[answers.ScoreSourceRecord],
    computed_at_us: int,
) -> answers.AttributionDocument:
    """Return the document of a step."""
    of_scorer = {floor.scorer: floor.k3_kl for floor in result.floors}
    branch = attribution.side_branch
    return from_attributes(
        answers.AttributionDocument,
        attribution,
        run=key.run_id,
        attempt=key.attempt,
        step=key.step,
        links=_with_excess(attribution.links, of_scorer),
        whole=_with_excess([attribution.whole], of_scorer)[0],
        side_branch=branch and replace(branch, links=_with_excess(branch.links, of_scorer)),
        floors=result.floors,
        of_rollouts=result.of_rollouts,
        from_sample=attribution.rollouts < result.of_rollouts,
        scores=tuple(scores),
        environments=_environments(attribution.chain, result),
        environment_links=result.environment_links,
        method=METHOD,
        declared_precision=precision_in_words(declared_precision(result.run_fingerprints.get("trainer"))),
        computed_at_us=computed_at_us,
    )


def exact_of_link(exact: replays.ExactRecord, scores: Sequence[answers.ScoreSourceRecord]) -> answers.ExactOfLinkRecord:
    """Return the divergences with the fingerprint fields that differ from those of the scores of the same names."""
    plain = {score.scorer: score.fingerprint for score in scores if not score.variant}
    differing: set[str] = set()
    for name, own in ((exact.target, exact.target_fingerprint), (exact.behaviour, exact.behaviour_fingerprint)):
        other = plain.get(name, own)
        differing |= {field for field in own.keys() | other.keys() if own.get(field) != other.get(field)}
    return from_attributes(
        answers.ExactOfLinkRecord, exact, other_settings=tuple(sorted(differing - {"batch_composition"}))
    )


def _with_excess(links: Iterable[answers.LinkRecord], floors: Mapping[str, float]) -> tuple[answers.LinkRecord, ...]:
    return tuple(replace(link, excess_k3_kl=excess_over_floors(link.name, link.k3_kl, floors)) for link in links)


def _environments(chain: Sequence[str], result: AttributionResult) -> dict[str, answers.EnvironmentRecord | None]:
    made = {
        name: Environment.of_fingerprint(fingerprint)
        for name, fingerprint in result.run_fingerprints.items()
        if fingerprint is not None
    }
    made |= {score.name: score.environment for score in result.used}
    return {name: environment_record(made[name]) if name in made else None for name in chain}


def mark_stale(session: Session, key: events.StepKey, now_us: int) -> None:
    """Mark the step's attribution as stale; adds a row without a document if there is none."""
    row = {**key._asdict(), "stale": True, "changed_at_us": now_us}
    engine.upsert(session, tables.Attribution, [row], events.StepKey._fields)


def newest_documents(
    session: Session, run_id: str, limit: int, *chosen: ColumnElement[bool]
) -> list[tuple[events.StepKey, dict[str, Any] | None]]:
    """Return the documents of up to `limit` active steps that have replayed scores, the newest first.

    A document is None before it is computed, and if the scores give no attribution.
    """
    active = attempts.active_rows(session, run_id, tables.Attribution)
    query = select(tables.Attribution.attempt, tables.Attribution.step, tables.Attribution.document)
    query = query.where(tables.Attribution.run_id == run_id, active, *chosen)
    found = session.execute(query.order_by(tables.Attribution.step.desc()).limit(limit))
    return [(events.StepKey(run_id, attempt, step), document) for attempt, step, document in found]


def stale_until(session: Session, at_us: int) -> list[events.StepKey]:
    """Return the steps whose attribution became stale up to a time, the longest ago first."""
    query = (
        select(tables.Attribution.run_id, tables.Attribution.attempt, tables.Attribution.step)
        .join(tables.Run, tables.Run.id == tables.Attribution.run_id)
        .where(tables.Attribution.stale, tables.Attribution.changed_at_us <= at_us, tables.Run.deleted_at_us.is_(None))
        .order_by(tables.Attribution.changed_at_us)
    )
    return [events.StepKey(*row) for row in session.execute(query)]


DRIFT_STEPS = 20
"""The newest other probed steps, with which the conclusions compare a step."""
MOST_STEPS = 200
"""The newest attributed steps of a run, which are read for its causes: one takes about a millisecond."""

_TITLES: dict[conclusion.ConclusionKind, str] = {
    "trainer-precision": "the trainer computes in float32 and its replay does not",
}


def causes_of_run(session: Session, run_id: str) -> list[findings.Finding]:
    """Return the causes named by the newest attributions of active steps, each with its newest sentence."""
    computed = tables.Attribution.computed_at_us.is_not(None)
    rows = newest_documents(session, run_id, MOST_STEPS, computed)
    read = [(key, parse(answers.AttributionDocument, stored) if stored is not None else None) for key, stored in rows]
    found: list[tuple[int, list[findings.Finding]]] = []
    for place, (key, document) in enumerate(read):
        if document is None:
            continue
        others = [*read[: min(place, DRIFT_STEPS)], *read[place + 1 :]][:DRIFT_STEPS]
        earlier = [other for _, other in reversed(others) if other is not None]
        # Exact divergences name no cause, so they are not read.
        causes = [each for each in attribution.conclude_attribution(document, earlier) if each.names_cause]
        found.append((key.step, [_finding(document, cause) for cause in causes]))
    return findings.newest_of_steps(found)


def _finding(document: answers.AttributionDocument, cause: conclusion.Conclusion) -> findings.Finding:
    link = next((link for link in document.links if link.name == cause.link), None)
    if cause.kind != "cause" or link is None:
        return findings.Finding(cause.kind, "info", _TITLES.get(cause.kind, cause.kind), cause.sentence)
    confidence = runs.ConfidenceRecord(share=link.share, low=link.share_low, high=link.share_high)
    return findings.Finding(link.name, "info", link.short_cause, cause.sentence, confidence=confidence)
