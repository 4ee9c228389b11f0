"""Compute a step's attribution from files: the chain, the comparisons and the noise floors. Runs in a decoder process.

The logged scores (`rollout`, `trainer`) are in the token files; the replayed scores are in score files that name their
rollouts. A rollout without a score has NaN in that score and is left out of every comparison with it.

A scorer run twice has k3 = σ², its noise floor. In a comparison with another scorer its noise adds σ²/2, so half of
each end's floor is subtracted. The result is never clamped: a negative result means that the noise exceeds the k3.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock import comparisons, errors, fingerprint, scorers
from foreshock.api.attribution import EnvironmentLinkRecord, EnvironmentRecord, NoiseFloorRecord
from foreshock.api.records import from_attributes
from foreshock.environment import Environment, differences
from foreshock.measures.comparison import compare
from foreshock.measures.estimators.attribution import Attribution, attribute, environment_link, excess_over_environments
from foreshock.rollouts import RolloutBatch, arrays
from foreshock_service.replay import files
from foreshock_service.replay.files import PinnedRollouts, read_rollouts
from foreshock_service.replay.probes.environments import run_fingerprints
from foreshock_service.runs.shard_decoding import FoldedStatistics

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AttributionResult:
    """The chain of a step (None with fewer than two scores), its comparisons and the noise floors.

    `used` are the given scores that were chosen; `run_fingerprints` are the fingerprints of the logged scores, by name.
    """

    attribution: Attribution | None
    comparisons: tuple[FoldedStatistics, ...]
    floors: tuple[NoiseFloorRecord, ...]
    of_rollouts: int
    used: tuple[files.StoredScore, ...]
    run_fingerprints: Mapping[str, fingerprint.Fingerprint | None]
    environment_links: tuple[EnvironmentLinkRecord, ...]


def attribute_step(
    rollouts: PinnedRollouts,
    published: Sequence[files.StoredScore],
    attempt_fingerprint: Mapping[str, Any] | None = None,
) -> AttributionResult:
    """Return the attribution of a step: its logged and replayed scores over the same tokens.

    `published` are the step's scores, newest first, in all environments. The chain uses each scorer's scores from the
    environment nearest to the run's own; its scores from other environments are compared with these.
    """
    batch = read_rollouts(rollouts)
    run = run_fingerprints(batch.attributes, attempt_fingerprint or {})
    scores = files.preferred_scores(published, run)
    replayed = {each.name: files.read_aligned_scores(batch, each.file) for each in scores}
    plain = {each.name: replayed[each.name] for each in scores if not each.variant}
    attribution: Attribution | None = None
    # Raised if the chain has fewer than two scores.
    with contextlib.suppress(errors.ConfigurationError):
        where = (batch.response_offsets, batch.response_mask, batch.group_ids)
        attribution = attribute({**logged_scores(batch), **plain}, *where)
    known = {**logged_scores(batch), **replayed}
    pairs = _pairs_of(attribution)
    again = {name: scorers.score_name(name, scorers.NOISE_FLOOR_VARIANT) for name in plain}
    floors = [(again[name], name) for name in plain if again[name] in replayed]
    of_rollouts = batch.num_rollouts + rollouts.unstored
    chain = attribution.chain if attribution is not None else ()
    compared = {
        # Two scores of the chain are compared on the rollouts that all scores of the chain contain.
        pair: _compare(batch, of_rollouts, known, *pair, chain if set(pair) <= set(chain) else pair)
        for pair in [*pairs, *floors]
    }
    return AttributionResult(
        attribution=attribution,
        comparisons=tuple(compared.values()),
        floors=tuple(
            NoiseFloorRecord(
                scorer=pair[1],
                comparison=compared[pair].comparison,
                **{name: compared[pair].measures[name] for name in ("k3_kl", "mean_abs_d", "max_abs_d")},
                rollouts=int(compared[pair].measures["rollouts"]),
                tokens=int(compared[pair].measures["tokens"]),
            )
            for pair in floors
        ),
        of_rollouts=of_rollouts,
        used=tuple(scores),
        run_fingerprints=run,
        environment_links=tuple(_environment_links(batch, published, scores, known, run)),
    )


def _environment_links(
    batch: RolloutBatch,
    published: Sequence[files.StoredScore],
    chosen: Sequence[files.StoredScore],
    known: Mapping[str, Values],
    run: Mapping[str, fingerprint.Fingerprint | None],
) -> Iterator[EnvironmentLinkRecord]:
    """Compare each scorer of the chain with its scores in other environments."""
    where = (batch.response_offsets, batch.response_mask, batch.group_ids)
    whole = (known["trainer"], known["rollout"]) if {"trainer", "rollout"} <= set(known) else None
    for score in chosen:
        if score.variant:
            continue
        first, values = score.environment, known[score.name]
        side = scorers.SCORERS[score.scorer].side if score.scorer in scorers.SCORERS else None
        logged = {"engine": "rollout", "trainer": "trainer"}.get(side or "")
        made = run.get(logged) if logged is not None else None
        own = Environment.of_fingerprint(made) if made is not None else None
        for other in files.other_environments(published, score):
            second, again = other.environment, files.read_aligned_scores(batch, other.file)
            excess = (math.nan, math.nan, math.nan)
            # Computed only if neither environment is the run's own.
            is_own = own is not None and any(not differences(own, each, same_engine=True) for each in (first, second))
            if logged is not None and logged in known and not is_own:
                excess = excess_over_environments(known[logged], values, again, *where)
            yield from_attributes(
                EnvironmentLinkRecord,
                environment_link(values, again, whole, *where),
                scorer=score.scorer,
                first=environment_record(first),
                second=environment_record(second),
                logged=logged,
                excess=excess[0],
                excess_low=excess[1],
                excess_high=excess[2],
            )


def environment_record(environment: Environment) -> EnvironmentRecord:
    return from_attributes(EnvironmentRecord, environment, words=environment.describe())


def logged_scores(batch: RolloutBatch) -> dict[str, Values]:
    logged = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs}
    return {name: values for name, values in logged.items() if values is not None}


def _pairs_of(attribution: Attribution | None) -> list[tuple[str, str]]:
    """Return (target, behaviour) of any two scores of the chain and of each link of the side branch.

    trainer/rollout is left out: it is measured when the step closes. All pairs are returned, not only the links: which
    scores are neighbours depends on which jobs ended first, and the set of measured comparisons must not depend on it.
    """
    if attribution is None:
        return []
    pairs = [(later, earlier) for earlier, later in itertools.combinations(attribution.chain, 2)]
    branch = attribution.side_branch.links if attribution.side_branch is not None else ()
    pairs += [comparisons.split_comparison(link.name) for link in branch]
    return [pair for pair in pairs if comparisons.comparison_name(*pair) != comparisons.TRAINER_ROLLOUT]


def _compare(
    batch: RolloutBatch,
    of_rollouts: int,
    scores: Mapping[str, Values],
    target: str,
    behaviour: str,
    together: Sequence[str],
) -> FoldedStatistics:
    # Rollouts with a finite value in each of the scores `together`.
    finite = [arrays.row_counts(np.isfinite(scores[name]), batch.response_offsets) > 0 for name in together]
    rows = np.flatnonzero(np.logical_and.reduce(finite))
    shared = batch.select(rows)
    tokens = np.repeat(np.isin(np.arange(batch.num_rollouts), rows), batch.response_lengths)
    compared = compare(shared, scores[target][tokens], scores[behaviour][tokens])
    statistics = compared.statistics
    return FoldedStatistics(
        comparison=comparisons.comparison_name(target, behaviour),
        measures=compared.measures(),
        statistics_version=statistics.statistics_version,
        statistics=statistics.to_bytes(),
        summaries=compared.summaries.to_bytes(),
        from_sample=rows.size < of_rollouts,
    )


def excess_over_floors(comparison: str, k3_kl: float, floors: Mapping[str, float]) -> float:
    """Return k3 − ½·floor(target) − ½·floor(behaviour) in nats; NaN if a floor is unknown or k3 is not finite.

    `floors` maps a scorer to the k3 of its noise floor.
    """
    known = [
        next((floors[name] for name in scorers.noise_floor_scorers(scorer) if name in floors), math.nan)
        for scorer in comparisons.split_comparison(comparison)
    ]
    excess = k3_kl - 0.5 * sum(known)
    return excess if math.isfinite(excess) else math.nan
