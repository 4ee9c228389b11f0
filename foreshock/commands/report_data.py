"""The data of `foreshock report`, collected before its text is written."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.api.attribution import AttributionRecord
from foreshock.api.diagnosis import Diagnosis
from foreshock.api.runs import RunRecord
from foreshock.api.watch import AdviceRecord, AlertRecord
from foreshock.commands.queries import Bucket, Curve, RunQueries, values_of_steps
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.lag_zero import at_lag_zero
from foreshock.diagnosis.lags import LagLevels, StepLags
from foreshock.errors import ConfigurationError
from foreshock.measures.registry import K3_BY_LAG, TOKENS_BY_LAG
from foreshock.model_kind import ModelKind

MISMATCH_MEASURES = (
    "k3_kl",
    "k3_kl_bootstrap_low",
    "k3_kl_bootstrap_high",
    "prompt_groups",
    "effective_groups",
    "rollout_probs_diff_mean",
    "token_mult_prob_error",
    "tail_2",
    "ess_token",
    "max_abs_d",
    "tokens",
    "zero_fraction",
    "nonfinite_target",
    "nonfinite_behaviour",
    "max_d",
    "low_probability_abs_d",
    "tail_asymmetry_ln2",
    "pareto_k",
    "pareto_k_inverse",
    "ess_seq_predicted",
    "advantage_d_cov",
    "advantage_skew",
    *(measure.column for measure in (*K3_BY_LAG, *TOKENS_BY_LAG)),
)
STEP_MEASURES = (
    "response_length_mean",
    "response_length_p50",
    "response_length_p99",
    "response_length_max",
    "truncated_fraction",
    "reward_mean",
    "entropy_mean",
    "num_rollouts",
    "num_tokens",
    "lag_mean",
)
SHOWN_MEASURES = ("k3_kl", "rollout_probs_diff_mean", "token_mult_prob_error", "tail_2")
"""The measures of the mismatch that a report shows beside their healthy ranges."""

RECENT_STEPS = 10
"""Newest steps whose median describes tails, lengths and rewards."""

_MAX_ATTRIBUTIONS = 4


@dataclass(frozen=True, slots=True)
class ReportData:
    """The state of a run. `buckets` are those of `step`, or empty with the reason in `buckets_missing`; `attributions`
    are those of probed steps. `ignored` says what the lint of the newest step left out at masked tokens."""

    run: RunRecord
    url: str
    step: int | None
    mismatch: Curve
    rollouts: Curve
    diagnosis: Diagnosis
    attributions: tuple[AttributionRecord, ...]
    probed_steps: tuple[int, ...]
    unfinished_probes: tuple[tuple[int, str, str], ...]
    buckets: tuple[Bucket, ...]
    alerts: tuple[AlertRecord, ...]
    advice: AdviceRecord | None
    buckets_missing: str = ""
    ignored: str = ""

    @property
    def model_kind(self) -> ModelKind | None:
        """The kind of model whose ranges hold."""
        return self.run.model_kind

    @property
    def standing_alerts(self) -> list[AlertRecord]:
        """The alerts that were not retracted."""
        return [alert for alert in self.alerts if alert.state != "retracted"]

    @property
    def newest_lags(self) -> LagLevels:
        """k3 at each lag over the newest measured steps, as the diagnosis compares it with its range."""
        k3 = self.mismatch.of("k3_kl")
        measured = [values for values, of_all in zip(self._steps(), k3, strict=True) if math.isfinite(of_all)]
        return LagLevels.of([StepLags.of(values) for values in measured[-RECENT_STEPS:]])

    def at_lag_zero(self, measure: str) -> tuple[float, ...]:
        """Return a measure at each step of `mismatch` as its range judges it; NaN if the range does not hold."""
        found = (at_lag_zero(measure, values) for values in self._steps())
        return tuple(math.nan if value is None else value for value in found)

    def _steps(self) -> list[dict[str, float]]:
        return values_of_steps(self.mismatch, self.rollouts)


def collect(queries: RunQueries, run: RunRecord, url: str, *, step: int | None) -> ReportData:
    """Collect the report of `run`. Raises ServiceError, and ConfigurationError if no rollouts of `step` are stored.

    `step` is the step of attribution and buckets; None: all probed steps, and the newest of them (else of all steps).
    """
    mismatch = queries.curve(TRAINER_ROLLOUT, MISMATCH_MEASURES)
    rollouts = queries.rollouts(run, STEP_MEASURES)
    steps = rollouts.steps if rollouts.has_rollouts else mismatch.steps
    if step is not None and step not in steps:
        raise ConfigurationError(_no_step(run, step, steps))
    probed = queries.probed_steps()
    selected = (step,) if step is not None else evenly_spaced(probed, _MAX_ATTRIBUTIONS)
    attributions = tuple(found for each in selected if (found := queries.attribution(each)) is not None)
    if step is None:
        step = next(iter([*[found.step for found in attributions[-1:]], *mismatch.steps[-1:]]), None)
    buckets = queries.buckets(step, TRAINER_ROLLOUT) if step is not None else ()
    return ReportData(
        run=run,
        url=url,
        step=step,
        mismatch=mismatch,
        rollouts=rollouts,
        diagnosis=queries.diagnosis(),
        attributions=attributions,
        probed_steps=probed,
        unfinished_probes=queries.unfinished_probes(),
        buckets=() if isinstance(buckets, str) else buckets,
        alerts=queries.alerts(),
        advice=queries.advice(),
        buckets_missing=buckets if isinstance(buckets, str) else "",
        ignored=queries.ignored_values(rollouts.steps[-1]) if rollouts.has_rollouts else "",
    )


def _no_step(run: RunRecord, step: int, steps: Sequence[int]) -> str:
    stored = f"{len(steps)} steps from {min(steps)} to {max(steps)} are" if steps else "no step is"
    return f"the run {run.title} has no rollouts of step {step}: {stored} stored"


def evenly_spaced(steps: Sequence[int], most: int) -> tuple[int, ...]:
    """Return at most `most` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= most:
        return tuple(steps)
    return tuple(steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most))


def recent_median(values: Sequence[float]) -> float:
    """Return the median of the newest finite values; NaN if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite[-RECENT_STEPS:]) if finite else math.nan


def recent_mean(values: Sequence[float], tokens: Sequence[float]) -> float:
    """Return the mean over the tokens of the newest steps that have a value; NaN without any."""
    known = [(value, count) for value, count in zip(values, tokens, strict=True) if math.isfinite(value) and count > 0]
    newest = known[-RECENT_STEPS:]
    whole = sum(count for _, count in newest)
    return sum(value * count for value, count in newest) / whole if whole else math.nan
