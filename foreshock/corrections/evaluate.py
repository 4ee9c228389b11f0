"""What a correction would do to this batch: evaluated from statistics and summaries, never applied."""

from __future__ import annotations

import numpy as np

from foreshock.corrections.catalogue import CORRECTIONS, Correction, correction_named
from foreshock.corrections.exact_kl import ExactKl
from foreshock.corrections.results import Evaluation
from foreshock.corrections.sequence_level import evaluate_sequences
from foreshock.corrections.sequences import Sequences
from foreshock.corrections.thresholds import Threshold
from foreshock.corrections.token_level import TokenSums, evaluate_tokens
from foreshock.errors import InvalidArgumentError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries

__all__ = ["Evaluator", "evaluate", "evaluate_usual"]


class Evaluator:
    """The rollouts of one comparison, ready for any number of corrections and thresholds.

    `exact_kl` has a row for each of `summaries`, with a KL for each that has a measured token. Raises
    InvalidArgumentError where the parts are not of the same rollouts.
    """

    def __init__(
        self, statistics: ComparisonStatistics, summaries: RolloutSummaries, exact_kl: ExactKl | None = None
    ) -> None:
        _require_fit(statistics, summaries, exact_kl)
        self._tokens = TokenSums(statistics)
        self._sequences = Sequences.of(summaries)
        self._exact_kl = exact_kl

    def evaluate(self, name: str, threshold: Threshold | None = None) -> Evaluation:
        """What the correction `name` would do; without `threshold`, at its first usual one.

        Sequence thresholds are exact; token thresholds are exact at ratios of 1, 2, e, 5, 10 and so on (TAIL_LEVELS),
        else the nearest edge of the histogram is used and said. Raises InvalidArgumentError for an unknown name and a
        threshold that makes no sense.
        """
        correction = correction_named(name)
        threshold = self._usual(correction) if threshold is None else correction.check(threshold)
        if not self._sequences.count:
            return Evaluation(correction, threshold, threshold, not_estimable="no token has two finite log-probs")
        if correction.level == "token":
            return evaluate_tokens(correction, threshold, self._tokens, self._sequences)
        return evaluate_sequences(correction, threshold, self._sequences, self._exact_kl)

    def evaluate_usual(self) -> tuple[Evaluation, ...]:
        """Every correction at each of its usual thresholds, in the order of the catalogue.

        One without a usual threshold comes once, as not estimable, unless there are exact KLs: name a threshold then.
        """
        return tuple(
            self.evaluate(name, threshold)
            for name, correction in CORRECTIONS.items()
            for threshold in correction.usual or (None,)
            if threshold is not None or self._exact_kl is None
        )

    def _usual(self, correction: Correction) -> Threshold:
        if correction.usual:
            return correction.usual[0]
        if self._exact_kl is None:
            return Threshold()
        raise InvalidArgumentError(f"{correction.name} has no usual threshold: name one", "threshold")


def evaluate(
    name: str,
    statistics: ComparisonStatistics,
    summaries: RolloutSummaries,
    threshold: Threshold | None = None,
    exact_kl: ExactKl | None = None,
) -> Evaluation:
    """One correction of one comparison, as `Evaluator` says; raises InvalidArgumentError."""
    return Evaluator(statistics, summaries, exact_kl).evaluate(name, threshold)


def evaluate_usual(statistics: ComparisonStatistics, summaries: RolloutSummaries) -> tuple[Evaluation, ...]:
    """Every correction at each of its usual thresholds, as `Evaluator` says; raises InvalidArgumentError."""
    return Evaluator(statistics, summaries).evaluate_usual()


def _require_fit(statistics: ComparisonStatistics, summaries: RolloutSummaries, exact_kl: ExactKl | None) -> None:
    tokens = int(summaries.column("n_tokens").sum()) if summaries.num_rollouts else 0
    if tokens != statistics.tokens or summaries.num_rollouts != statistics.rollouts:
        raise InvalidArgumentError(
            f"hold {summaries.num_rollouts} rollouts with {tokens} tokens, the statistics {statistics.rollouts} with "
            f"{statistics.tokens}: they are not of the same rollouts",
            "summaries",
        )
    if exact_kl is None:
        return
    for values in (exact_kl.largest, exact_kl.mean):
        if values.shape != (summaries.num_rollouts,):
            raise InvalidArgumentError(f"has {values.size} rows for {summaries.num_rollouts} rollouts", "exact_kl")
        missing = int((np.isnan(values) & (summaries.column("n_tokens") > 0)).sum())
        if missing:
            raise InvalidArgumentError(f"has no KL for {missing} of the rollouts that were measured", "exact_kl")
