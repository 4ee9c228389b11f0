"""What a correction would do to this batch: evaluated from statistics and summaries, never applied."""

from __future__ import annotations

from foreshock.corrections.catalogue import CORRECTIONS, Correction, correction_named
from foreshock.corrections.exact_kl import ExactKl
from foreshock.corrections.results import Evaluation
from foreshock.corrections.sequence_level import evaluate_sequences
from foreshock.corrections.thresholds import Threshold
from foreshock.corrections.token_level import evaluate_tokens
from foreshock.errors import InvalidArgumentError
from foreshock.measures.statistics import ComparisonStatistics
from foreshock.measures.summaries import RolloutSummaries

__all__ = ["evaluate", "evaluate_usual"]


def evaluate(
    name: str,
    statistics: ComparisonStatistics,
    summaries: RolloutSummaries,
    threshold: Threshold | None = None,
    exact_kl: ExactKl | None = None,
) -> Evaluation:
    """What the correction `name` would do to the rollouts of a comparison; without `threshold`, at its first usual one.

    Sequence thresholds are exact; token thresholds are exact at ratios of 1, 2, e, 5, 10 and so on (TAIL_LEVELS), else
    the nearest edge of the histogram is used and said. `exact_kl` has a row for each of `summaries`. Raises
    InvalidArgumentError for an unknown name, a threshold that makes no sense, and parts that do not fit together.
    """
    correction = correction_named(name)
    _require_fit(statistics, summaries, exact_kl)
    threshold = _usual(correction, exact_kl) if threshold is None else correction.check(threshold)
    if statistics.tokens == 0:
        return Evaluation(correction, threshold, threshold, not_estimable="no token has two finite log-probs")
    if correction.level == "token":
        return evaluate_tokens(correction, threshold, statistics, summaries)
    return evaluate_sequences(correction, threshold, summaries, exact_kl)


def evaluate_usual(statistics: ComparisonStatistics, summaries: RolloutSummaries) -> tuple[Evaluation, ...]:
    """Every correction at each of its usual thresholds, in the order of the catalogue; TRM as not estimable."""
    thresholds: tuple[Threshold | None, ...]
    found = []
    for name, correction in CORRECTIONS.items():
        thresholds = correction.usual or (None,)
        found += [evaluate(name, statistics, summaries, threshold) for threshold in thresholds]
    return tuple(found)


def _usual(correction: Correction, exact_kl: ExactKl | None) -> Threshold:
    if correction.usual:
        return correction.usual[0]
    if exact_kl is None:
        return Threshold()
    raise InvalidArgumentError(f"{correction.name} has no usual threshold: name one", "threshold")


def _require_fit(statistics: ComparisonStatistics, summaries: RolloutSummaries, exact_kl: ExactKl | None) -> None:
    tokens = int(summaries.column("n_tokens").sum()) if summaries.num_rollouts else 0
    if tokens != statistics.tokens or summaries.num_rollouts != statistics.rollouts:
        raise InvalidArgumentError(
            f"hold {summaries.num_rollouts} rollouts with {tokens} tokens, the statistics {statistics.rollouts} with "
            f"{statistics.tokens}: they are not of the same rollouts",
            "summaries",
        )
    if exact_kl is not None and exact_kl.mean.shape != (summaries.num_rollouts,):
        raise InvalidArgumentError(f"has {exact_kl.mean.size} rows for {summaries.num_rollouts} rollouts", "exact_kl")
