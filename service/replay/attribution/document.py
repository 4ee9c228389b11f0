"""The stored document of an attribution, made of what a decoder computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from foreshock.api.attribution import (
    AttributionDocument,
    EnvironmentLinkRecord,
    EnvironmentRecord,
    ExactOfLinkRecord,
    LinkRecord,
    NoiseFloorRecord,
    ScoreSourceRecord,
    SideBranchRecord,
)
from foreshock.api.records import from_attributes
from foreshock.api.replays import ExactRecord
from foreshock.environment import Environment
from foreshock.interval_names import interval_name
from foreshock.json_values import number_or_nan
from foreshock.measures.estimators.attribution import METHOD, Attribution, Link, SideBranch
from foreshock_service.replay.attribution.compute import (
    AttributionResult,
    MeasuredEnvironmentLink,
    excess_over_floors,
)
from foreshock_service.replay.probes.environments import declared_precision, precision_in_words
from foreshock_service.replay.results.files import environment_of
from foreshock_service.runs.events import StepKey


def document_of(
    key: StepKey,
    attribution: Attribution,
    result: AttributionResult,
    scores: Sequence[ScoreSourceRecord],
    computed_at_us: int,
) -> AttributionDocument:
    """Return the document of a step."""
    of_scorer = {floor.scorer: floor.k3_kl for floor in result.floors}
    branch = attribution.side_branch
    return AttributionDocument(
        run=key.run_id,
        attempt=key.attempt,
        step=key.step,
        chain=attribution.chain,
        missing=attribution.missing,
        links=tuple(_link(link, of_scorer) for link in attribution.links),
        whole=_link(attribution.whole, of_scorer),
        side_branch=_side_branch(branch, of_scorer) if branch is not None else None,
        floors=tuple(from_attributes(NoiseFloorRecord, floor) for floor in result.floors),
        cancellation=attribution.cancellation,
        telescoping_error=attribution.telescoping_error,
        tokens=attribution.tokens,
        rollouts=attribution.rollouts,
        groups=attribution.groups,
        of_rollouts=result.of_rollouts,
        from_sample=attribution.rollouts < result.of_rollouts,
        scores=tuple(scores),
        environments=_environments(attribution.chain, result),
        environment_links=tuple(map(_environment_link, result.environment_links)),
        interval=interval_name(attribution.reliable),
        method=METHOD,
        declared_precision=precision_in_words(declared_precision(result.run_fingerprints.get("trainer"))),
        computed_at_us=computed_at_us,
    )


def environment_in(record: EnvironmentRecord) -> Environment:
    """Return the environment that a document names."""
    return Environment(**{name: value for name, value in asdict(record).items() if name != "words"})


def exact_of_link(exact: ExactRecord, scores: Sequence[ScoreSourceRecord]) -> ExactOfLinkRecord:
    """Return the divergences with what differs from the scores of the same names."""
    plain = {score.scorer: score.fingerprint for score in scores if not score.variant}
    differing: set[str] = set()
    for name, own in ((exact.target, exact.target_fingerprint), (exact.behaviour, exact.behaviour_fingerprint)):
        other = plain.get(name, own)
        differing |= {field for field in own.keys() | other.keys() if own.get(field) != other.get(field)}
    return from_attributes(ExactOfLinkRecord, exact, other_settings=tuple(sorted(differing - {"batch_composition"})))


def _link(link: Link, floors: Mapping[str, float]) -> LinkRecord:
    excess = number_or_nan(excess_over_floors(link.name, link.k3_kl, floors))
    return from_attributes(LinkRecord, link, excess_k3_kl=excess)


def _side_branch(branch: SideBranch, floors: Mapping[str, float]) -> SideBranchRecord:
    links = tuple(_link(link, floors) for link in branch.links)
    return from_attributes(SideBranchRecord, branch, links=links, interval=interval_name(branch.reliable))


def _environment_link(measured: MeasuredEnvironmentLink) -> EnvironmentLinkRecord:
    excess, low, high = measured.excess or (math.nan,) * 3
    return from_attributes(
        EnvironmentLinkRecord,
        measured.link,
        scorer=measured.scorer,
        first=_environment(measured.first),
        second=_environment(measured.second),
        logged=measured.logged,
        excess=excess,
        excess_low=low,
        excess_high=high,
        interval=interval_name(measured.link.reliable),
    )


def _environments(chain: Sequence[str], result: AttributionResult) -> dict[str, EnvironmentRecord | None]:
    made = {
        name: Environment.of_fingerprint(fingerprint)
        for name, fingerprint in result.run_fingerprints.items()
        if fingerprint is not None
    }
    made |= {score.name: environment_of(score) for score in result.used}
    return {name: _environment(made[name]) if name in made else None for name in chain}


def _environment(environment: Environment) -> EnvironmentRecord:
    return from_attributes(EnvironmentRecord, environment, words=environment.describe())
