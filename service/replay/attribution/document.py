"""The stored document of an attribution: made from the result of a computation, stored, and read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from foreshock.api import attribution as records
from foreshock.api.records import from_attributes
from foreshock.api.replays import ExactRecord
from foreshock.environment import Environment
from foreshock.json_values import number_or_nan
from foreshock.measures.estimators.attribution import METHOD, Attribution, Link, SideBranch
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.database.tables import Attribution as StoredAttribution
from foreshock_service.replay.attribution.compute import AttributionResult, MeasuredEnvironmentLink, excess_over_floors
from foreshock_service.replay.probes.environments import declared_precision, precision_in_words
from foreshock_service.replay.results.files import environment_of
from foreshock_service.runs.attempts import AttemptStart, is_active
from foreshock_service.runs.events import StepKey


def document_of(
    key: StepKey,
    attribution: Attribution,
    result: AttributionResult,
    scores: Sequence[records.ScoreSourceRecord],
    computed_at_us: int,
) -> records.AttributionDocument:
    """Return the document of a step."""
    of_scorer = {floor.scorer: floor.k3_kl for floor in result.floors}
    branch = attribution.side_branch
    return from_attributes(
        records.AttributionDocument,
        attribution,
        run=key.run_id,
        attempt=key.attempt,
        step=key.step,
        links=tuple(_link(link, of_scorer) for link in attribution.links),
        whole=_link(attribution.whole, of_scorer),
        side_branch=_side_branch(branch, of_scorer) if branch is not None else None,
        floors=result.floors,
        of_rollouts=result.of_rollouts,
        from_sample=attribution.rollouts < result.of_rollouts,
        scores=tuple(scores),
        environments=_environments(attribution.chain, result),
        environment_links=tuple(map(_environment_link, result.environment_links)),
        method=METHOD,
        declared_precision=precision_in_words(declared_precision(result.run_fingerprints.get("trainer"))),
        computed_at_us=computed_at_us,
    )


def environment_in(record: records.EnvironmentRecord) -> Environment:
    """Return the environment that a document names."""
    return from_attributes(Environment, record)


def exact_of_link(exact: ExactRecord, scores: Sequence[records.ScoreSourceRecord]) -> records.ExactOfLinkRecord:
    """Return the divergences with what differs from the scores of the same names."""
    plain = {score.scorer: score.fingerprint for score in scores if not score.variant}
    differing: set[str] = set()
    for name, own in ((exact.target, exact.target_fingerprint), (exact.behaviour, exact.behaviour_fingerprint)):
        other = plain.get(name, own)
        differing |= {field for field in own.keys() | other.keys() if own.get(field) != other.get(field)}
    return from_attributes(
        records.ExactOfLinkRecord, exact, other_settings=tuple(sorted(differing - {"batch_composition"}))
    )


def _link(link: Link, floors: Mapping[str, float]) -> records.LinkRecord:
    excess = number_or_nan(excess_over_floors(link.name, link.k3_kl, floors))
    return from_attributes(records.LinkRecord, link, excess_k3_kl=excess)


def _side_branch(branch: SideBranch, floors: Mapping[str, float]) -> records.SideBranchRecord:
    links = tuple(_link(link, floors) for link in branch.links)
    return from_attributes(records.SideBranchRecord, branch, links=links)


def _environment_link(measured: MeasuredEnvironmentLink) -> records.EnvironmentLinkRecord:
    excess, low, high = measured.excess or (math.nan,) * 3
    return from_attributes(
        records.EnvironmentLinkRecord,
        measured.link,
        scorer=measured.scorer,
        first=_environment(measured.first),
        second=_environment(measured.second),
        logged=measured.logged,
        excess=excess,
        excess_low=low,
        excess_high=high,
    )


def _environments(chain: Sequence[str], result: AttributionResult) -> dict[str, records.EnvironmentRecord | None]:
    made = {
        name: Environment.of_fingerprint(fingerprint)
        for name, fingerprint in result.run_fingerprints.items()
        if fingerprint is not None
    }
    made |= {score.name: environment_of(score) for score in result.used}
    return {name: _environment(made[name]) if name in made else None for name in chain}


def _environment(environment: Environment) -> records.EnvironmentRecord:
    return from_attributes(records.EnvironmentRecord, environment, words=environment.describe())


def mark_stale(session: Session, key: StepKey, now_us: int) -> None:
    """Mark the step's attribution as stale; adds a row without a document if there is none."""
    row = {**key._asdict(), "stale": True, "changed_at_us": now_us}
    engine.upsert(session, StoredAttribution, [row], StepKey._fields)


def newest_documents(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], limit: int, *chosen: ColumnElement[bool]
) -> list[tuple[StepKey, dict[str, Any] | None]]:
    """Return the documents of up to `limit` active steps that have replayed scores, the newest first.

    A document is None before it is computed, and if the scores give no attribution.
    """
    active = is_active(attempts, StoredAttribution.attempt, StoredAttribution.step)
    query = select(StoredAttribution.attempt, StoredAttribution.step, StoredAttribution.document)
    query = query.where(StoredAttribution.run_id == run_id, active, *chosen)
    found = session.execute(query.order_by(StoredAttribution.step.desc()).limit(limit))
    return [(StepKey(run_id, attempt, step), document) for attempt, step, document in found]


def stale_before(session: Session, before_us: int, limit: int) -> list[StepKey]:
    """Return up to `limit` steps whose attribution became stale before a time, the longest ago first."""
    query = (
        select(StoredAttribution.run_id, StoredAttribution.attempt, StoredAttribution.step)
        .join(tables.Run, tables.Run.id == StoredAttribution.run_id)
        .where(StoredAttribution.stale, StoredAttribution.changed_at_us < before_us, tables.Run.deleted_at_us.is_(None))
        .order_by(StoredAttribution.changed_at_us)
        .limit(limit)
    )
    return [StepKey(*row) for row in session.execute(query)]
