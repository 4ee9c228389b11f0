"""Everything that a step's replayed scores say, from files. Runs in a decoder process: knows no database.

The logged scores (`rollout`, `trainer`) are in the rollouts' own files; the replayed ones are score shards that name
their rollouts. A rollout that a score does not have is NaN there, and takes no part where that score does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import ConfigurationError
from foreshock.measures.comparison import compare
from foreshock.measures.estimators.attribution import Attribution, attribute
from foreshock.rollouts import RolloutBatch, ScoreBatch
from foreshock.scorers import NOISE_FLOOR_VARIANT, score_name
from service.replay.scores.replayed import PinnedRollouts, read_rollouts, read_scores
from service.runs.measurements.folding import FoldedStatistics

Values = NDArray[np.float32]
# It is measured when its step closes, over all of the step's rollouts.
LOGGED = "trainer/rollout"


@dataclass(frozen=True, slots=True)
class ScoreFiles:
    """A published score: its scorer, variant and files."""

    scorer: str
    variant: str
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """`vllm.prefill`, or `vllm.prefill@rebatched`."""
        return score_name(self.scorer, self.variant)


@dataclass(frozen=True, slots=True)
class Floor:
    """The same scorer twice: its k3 is σ², and half of it is in any comparison of this scorer with another."""

    scorer: str
    comparison: str
    k3_kl: float
    mean_abs_d: float
    max_abs_d: float
    rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MeasuredComparison:
    """One comparison; `from_sample`: not all of the step's rollouts are in it."""

    folded: FoldedStatistics
    from_sample: bool


@dataclass(frozen=True, slots=True)
class StepFindings:
    """What the scores of a step give: the chain (None with fewer than two scores), comparisons and noise floors."""

    attribution: Attribution | None
    comparisons: tuple[MeasuredComparison, ...]
    floors: tuple[Floor, ...]
    of_rollouts: int


def compute_findings(rollouts: PinnedRollouts, scores: Sequence[ScoreFiles]) -> StepFindings:
    """Line the scores up with all rollouts of the step and compare them."""
    batch = read_rollouts(rollouts)
    replayed = {each.name: align(batch, read_all(each.files)) for each in scores}
    plain = {each.name: replayed[each.name] for each in scores if not each.variant}
    attribution = _attribute(batch, {**logged_scores(batch), **plain})
    known = {**logged_scores(batch), **replayed}
    wanted = _pairs_of(attribution)
    again = {name: score_name(name, NOISE_FLOOR_VARIANT) for name in plain}
    floors = [(again[name], name) for name in plain if again[name] in replayed]
    compared = {pair: _compare(batch, known, *pair, _together(attribution, pair)) for pair in [*wanted, *floors]}
    return StepFindings(
        attribution=attribution,
        comparisons=tuple(compared.values()),
        floors=tuple(_floor(pair, compared[pair].folded) for pair in floors),
        of_rollouts=batch.num_rollouts,
    )


def logged_scores(batch: RolloutBatch) -> dict[str, Values]:
    """The scores that the trainer logged."""
    logged = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs}
    return {name: values for name, values in logged.items() if values is not None}


def read_all(files: Sequence[Path]) -> list[ScoreBatch]:
    """The shards of a score."""
    return [read_scores(path) for path in files]


def align(batch: RolloutBatch, shards: Sequence[ScoreBatch]) -> Values:
    """[T] the scores in the order of the batch's tokens; NaN where a rollout has none."""
    aligned = np.full(batch.num_tokens, np.nan, dtype=np.float32)
    rows = {sample_id: row for row, sample_id in enumerate(batch.sample_ids)}
    for shard in shards:
        for index, sample_id in enumerate(shard.sample_ids):
            row = rows.get(sample_id)
            if row is not None:
                start, end = batch.response_offsets[row : row + 2]
                aligned[start:end] = shard.log_probs[shard.offsets[index] : shard.offsets[index + 1]]
    return aligned


def _attribute(batch: RolloutBatch, scores: Mapping[str, Values]) -> Attribution | None:
    try:
        return attribute(scores, batch.response_offsets, batch.response_mask, batch.group_ids)
    except ConfigurationError:
        return None  # Fewer than two scores of the chain.


def _pairs_of(attribution: Attribution | None) -> list[tuple[str, str]]:
    """(target, behaviour) of any two scores of the chain and of the side branch, except what is measured already.

    All pairs and not the links alone: which scores are neighbours depends on which jobs were done first, and the set of
    measured comparisons must not.
    """
    if attribution is None:
        return []
    pairs = [(later, earlier) for earlier, later in itertools.combinations(attribution.chain, 2)]
    branch = attribution.side_branch.links if attribution.side_branch is not None else ()
    pairs += [(target, behaviour) for target, _, behaviour in (link.name.partition("/") for link in branch)]
    return [pair for pair in pairs if "/".join(pair) != LOGGED]


def _together(attribution: Attribution | None, pair: tuple[str, str]) -> tuple[str, ...]:
    """The scores that must all have a rollout for the pair to be compared on it: for a link, those of the chain."""
    chain = attribution.chain if attribution is not None else ()
    return tuple(chain) if set(pair) <= set(chain) else pair


def _compare(
    batch: RolloutBatch, scores: Mapping[str, Values], target: str, behaviour: str, together: tuple[str, ...]
) -> MeasuredComparison:
    rows = np.flatnonzero(np.logical_and.reduce([_scored_rollouts(batch, scores[name]) for name in together]))
    shared = batch.select(rows)
    tokens = np.repeat(np.isin(np.arange(batch.num_rollouts), rows), batch.response_lengths)
    compared = compare(shared, scores[target][tokens], scores[behaviour][tokens])
    statistics = compared.statistics
    folded = FoldedStatistics(
        comparison=f"{target}/{behaviour}",
        measures=compared.measures(),
        statistics_version=statistics.statistics_version,
        statistics=statistics.to_bytes(),
        summaries=compared.summaries.to_bytes(),
    )
    return MeasuredComparison(folded, from_sample=rows.size < batch.num_rollouts)


def _scored_rollouts(batch: RolloutBatch, values: Values) -> NDArray[np.bool_]:
    """[N] whether the rollout has any finite value in this score."""
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.isfinite(values), dtype=np.int64)])
    return np.diff(running[batch.response_offsets]) > 0


def _floor(pair: tuple[str, str], folded: FoldedStatistics) -> Floor:
    measures = folded.measures
    return Floor(
        scorer=pair[1],
        comparison=folded.comparison,
        k3_kl=measures["k3_kl"],
        mean_abs_d=measures["mean_abs_d"],
        max_abs_d=measures["max_abs_d"],
        rollouts=int(measures["rollouts"]),
        tokens=int(measures["tokens"]),
    )
