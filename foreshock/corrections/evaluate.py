"""Evaluate corrections of a comparison from its statistics and rollout summaries."""

import numpy as np

from foreshock.corrections.catalogue import CORRECTIONS, Correction, Evaluation, Threshold, correction_named
from foreshock.corrections.sequence_level import ExactKl, Sequences, evaluate_sequences
from foreshock.corrections.token_level import TokenSums, evaluate_tokens
from foreshock.errors import InvalidArgumentError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries


class Evaluator:
    """Evaluate any number of corrections and thresholds on the rollouts of one comparison.

    `exact_kl` has a row for each row of `summaries`, and a KL for each row with a measured token. Raises
    InvalidArgumentError if the arguments describe different rollouts.
    """

    def __init__(
        self, statistics: ComparisonStatistics, summaries: RolloutSummaries, exact_kl: ExactKl | None = None
    ) -> None:
        _require_same_rollouts(statistics, summaries, exact_kl)
        self._tokens = TokenSums(statistics)
        self._sequences = Sequences.of(summaries)
        self._exact_kl = exact_kl

    def evaluate(self, name: str, threshold: Threshold | None = None) -> Evaluation:
        """Return the effect of the correction `name` at `threshold`; by default at its first usual threshold.

        Sequence thresholds are exact. Token thresholds are exact at ratios of 1, 2, e, 5, 10 and so on (TAIL_LEVELS);
        otherwise the nearest edge of the histogram is used and reported in `used`. Raises InvalidArgumentError for an
        unknown name or a threshold that does not fit the correction.
        """
        correction = correction_named(name)
        threshold = self._usual(correction) if threshold is None else correction.check(threshold)
        if not self._sequences.count:
            return Evaluation(correction, threshold, threshold, not_estimable="no token has two finite log-probs")
        if correction.level == "token":
            return evaluate_tokens(correction, threshold, self._tokens, self._sequences)
        return evaluate_sequences(correction, threshold, self._sequences, self._exact_kl)

    def evaluate_usual(self) -> tuple[Evaluation, ...]:
        """Return every correction at each of its usual thresholds, in the order of the catalogue.

        A correction without a usual threshold is included once, as not estimable. If exact KLs were passed it is left
        out: call `evaluate` with a threshold.
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
        raise InvalidArgumentError(f"{correction.name} has no usual threshold: pass one", "threshold")


def _require_same_rollouts(
    statistics: ComparisonStatistics, summaries: RolloutSummaries, exact_kl: ExactKl | None
) -> None:
    tokens = int(summaries.column("n_tokens").sum()) if summaries.num_rollouts else 0
    if tokens != statistics.tokens or summaries.num_rollouts != statistics.rollouts:
        raise InvalidArgumentError(
            f"must be of the same rollouts as the statistics, got {summaries.num_rollouts} rollouts with {tokens} "
            f"tokens, and statistics of {statistics.rollouts} with {statistics.tokens}",
            "summaries",
        )
    if exact_kl is None:
        return
    for values in (exact_kl.largest, exact_kl.mean):
        if values.shape != (summaries.num_rollouts,):
            raise InvalidArgumentError(
                f"must have one row per rollout, got {values.size} rows for {summaries.num_rollouts} rollouts",
                "exact_kl",
            )
        missing = int((np.isnan(values) & (summaries.column("n_tokens") > 0)).sum())
        if missing:
            raise InvalidArgumentError(f"has no KL for {missing} of the measured rollouts", "exact_kl")
