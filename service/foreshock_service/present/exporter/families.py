"""Every metric of /metrics: name, help and labels. A metric is added or changed only here.

Labels are bounded: run, comparison, bucket, link, accelerator, rule and severity, states. A step, a rollout or a token
is never a label; the newest step is a value (`foreshock_step`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from prometheus_client.metrics_core import Metric

from foreshock import comparisons, healthy_ranges
from foreshock.diagnosis import lags, least_tokens
from foreshock.measures.registry import COMPARISON_MEASURES
from foreshock.measures.statistics.conditions import LOW_PROBABILITY
from foreshock_service.replay.probes.jobs import LIVE_MINUTES

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric; `labels` are in the order of the label values of its samples."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"

    @property
    def sample_name(self) -> str:
        """The name of its samples, in both formats and in Prometheus: that of a counter ends with `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


# Column of the wide table → name without prefix, and help. Values are of the run's newest step with the comparison.
_OF_COMPARISONS = {
    "k3_kl": ("k3_kl_nats", "Mismatch: token mean of k3; KL(rollout‖target) if behaviour is rollout"),
    "kl": ("kl_nats", "Mismatch: token mean of -d (k1); KL(rollout‖target) if behaviour is rollout"),
    "mean_abs_d": ("log_prob_difference_abs_nats", "Token mean of |log target - log behaviour|"),
    "max_abs_d": ("log_prob_difference_max_nats", "Largest |log target - log behaviour| of a token"),
    "low_probability_abs_d": (
        "low_probability_log_prob_difference_abs_nats",
        f"Mean |log target - log behaviour| of the tokens with a probability below {LOW_PROBABILITY:g} under behaviour",
    ),
    "mean_ratio": ("mean_ratio", "Token mean of target/behaviour; 1 is ideal"),
    "chi2_token": ("chi2_token", "Token mean of (ratio - 1)^2, chi2(target‖behaviour)"),
    "token_mult_prob_error": ("token_mult_prob_error", "Token mean of exp|d|; 1 is ideal"),
    "ess_token": ("ess_token_ratio", "Effective sample size of token weights, as a fraction"),
    "rollout_probs_diff_mean": ("probability_difference_mean", "Token mean of |target - behaviour| as probabilities"),
    "tail_2": ("tail_2_ratio", "Tokens with a ratio above 2 or below 1/2, as a fraction"),
    "reverse_chi2_token": ("reverse_chi2_token", "Token mean of (1 - ratio)^2/ratio, chi2(behaviour‖target)"),
    "tail_asymmetry_ln2": ("tail_asymmetry_ln2", "P(ratio < 1/2) minus the weight of ratio > 2; may be negative"),
    "pareto_k": ("pareto_k", "Shape of the tail of the ratios, if they reach e"),
    "ess_seq_predicted": (
        "ess_sequence_predicted_ratio",
        "exp(-2 KL T): effective sample size of sequences, as a fraction",
    ),
    "advantage_d_cov": ("advantage_d_covariance", "Covariance of advantage and d over tokens"),
    "advantage_skew": ("advantage_skew", "Token mean of advantage times (ratio - 1); 0 is unskewed"),
    "bad_update_fraction": (
        "bad_update_ratio",
        "Tokens with advantage < 0 and behaviour - target >= 0.5, as a fraction",
    ),
    "k3_kl_per_entropy": ("k3_kl_per_entropy", "k3 divided by entropy: steadier than k3 while entropy falls"),
    "nonfinite_target": ("nonfinite_target_log_probs", "Target log-probs that are NaN or infinite"),
    "nonfinite_behaviour": ("nonfinite_behaviour_log_probs", "Behaviour log-probs that are NaN or infinite"),
}
# The same; values are of the run's newest closed step.
_OF_STEPS = {
    "response_length_mean": ("response_length_mean_tokens", "Mean response length"),
    "response_length_p50": ("response_length_p50_tokens", "Median response length"),
    "response_length_p90": ("response_length_p90_tokens", "90th percentile of lengths"),
    "response_length_p99": ("response_length_p99_tokens", "99th percentile of lengths"),
    "response_length_max": ("response_length_max_tokens", "Longest response"),
    "truncated_fraction": ("truncated_ratio", "Responses cut at the length cap, as a fraction"),
    "reward_mean": ("reward_mean", "Mean reward"),
    "entropy_mean": ("entropy_mean_nats", "Token mean of the logged entropy"),
    "lag_mean": ("lag_mean_versions", "Token mean of the lag: trainer weights version - the version that sampled"),
    "nonfinite_log_probs": ("nonfinite_log_probs", "Log-probs of the newest step that are NaN or infinite"),
}
_WITH_THRESHOLDS = frozenset({"token_mult_prob_error", "tail_2", "pareto_k"})


def _help_of_comparison(column: str, text: str) -> str:
    """Return the help of a metric of a comparison; for some measures it names the thresholds."""
    if column not in _WITH_THRESHOLDS:
        return text
    known = healthy_ranges.required_range(column)
    warning, critical = (known.threshold_text(threshold) for threshold in (known.warning, known.critical))
    return f"{text} (at lag 0: warning {warning}, critical {critical})"


OF_COMPARISONS = {
    column: Family(f"foreshock_{name}", _help_of_comparison(column, text), ("run", "comparison"))
    for column, (name, text) in _OF_COMPARISONS.items()
} | {
    measure.column: Family(measure.metric, f"{measure.formula}, {measure.aggregation}", ("run", "comparison"))
    for measure in COMPARISON_MEASURES
    if measure.metric
}
OF_STEPS = {column: Family(f"foreshock_{name}", text, ("run",)) for column, (name, text) in _OF_STEPS.items()}
# Column → the metric of the value that its healthy range judges, the same value as in the service's rules.
AT_LAG_ZERO = {
    "k3_kl": Family(
        "foreshock_lag_zero_k3_kl_nats",
        f"k3 of {comparisons.TRAINER_ROLLOUT} of the tokens at lag 0, for which its range holds; no sample if fewer "
        f"than {least_tokens.LEAST_TOKENS['k3_kl']} tokens are at lag 0",
        ("run", "comparison"),
    ),
    "tail_2": Family(
        "foreshock_lag_zero_tail_2_ratio",
        f"foreshock_tail_2_ratio of {comparisons.TRAINER_ROLLOUT}, if its range holds; no sample if less than "
        f"{100 * lags.NEARLY_ALL:g} % of the tokens are at lag 0, or the step has fewer than "
        f"{least_tokens.LEAST_TOKENS['tail_2']}",
        ("run", "comparison"),
    ),
}

RUN_INFO = Family(
    "foreshock_run_info",
    "A running run; model_kind is dense, moe or empty (unknown)",
    ("run", "project", "key", "name", "model", "model_kind"),
)
STEP = Family("foreshock_step", "The newest closed step", ("run",))
STEP_SHARDS = Family("foreshock_step_shards", "Shards of the newest closed step that have arrived", ("run",))
STEP_EXPECTED_SHARDS = Family(
    "foreshock_step_expected_shards", "Shards that the newest closed step should have", ("run",)
)
LAST_SEEN = Family(
    "foreshock_last_seen_timestamp_seconds", "Unix time of the run's last heartbeat or rollouts", ("run",)
)
LAST_INGEST = Family("foreshock_last_ingest_timestamp_seconds", "Unix time of the newest rollouts of the run", ("run",))
ROLLOUTS = Family("foreshock_ingested_rollouts", "Rollouts received", ("run",), "counter")
TOKENS = Family("foreshock_ingested_tokens", "Response tokens received", ("run",), "counter")

BUCKET_TOKENS = Family(
    "foreshock_bucket_tokens", "Tokens, by their probability under the behaviour score", ("run", "comparison", "bucket")
)
BUCKET_K3 = Family(
    "foreshock_bucket_k3_kl_nats",
    "Token mean of k3, by the probability under the behaviour score",
    ("run", "comparison", "bucket"),
)
LINK_SHARE = Family(
    "foreshock_link_share_ratio", "A link's share of the mismatch, E[d_link d]/E[d^2]; may be negative", ("run", "link")
)
LINK_K3 = Family("foreshock_link_k3_kl_nats", "k3 of a link of the chain", ("run", "link"))
ATTRIBUTED_STEP = Family("foreshock_attributed_step", "The newest step with an attribution", ("run",))

ALERTS_OPEN = Family("foreshock_alerts_open", "Open alerts", ("run", "rule", "severity"))
VERDICT = Family(
    "foreshock_diagnosis_verdict",
    "The diagnosis of the run: 1 for its verdict (critical, warning, healthy or unknown), 0 for the others",
    ("run", "verdict"),
)
REWARD_COLLAPSED = Family("foreshock_reward_collapsed", "1 while a collapse of the reward is open", ("run",))
ADVICE_MODE = Family("foreshock_advice_mode", "1 for the advice mode of the run, 0 for the other", ("run", "mode"))
ADVICE_REVISION = Family("foreshock_advice_revision", "Revision of the newest advice", ("run",))
ADVICE_ACKNOWLEDGED = Family(
    "foreshock_advice_acknowledged_revision", "Revision of the advice that the trainer has acknowledged", ("run",)
)
ADVISED_SCALE = Family("foreshock_learning_rate_advised_scale", "Advised factor of the learning rate", ("run",))
APPLIED_SCALE = Family(
    "foreshock_learning_rate_applied_scale",
    "Learning rate reported by the trainer, divided by the run's initial one; includes the trainer's own schedule",
    ("run",),
)

RUNS = Family("foreshock_runs", "Runs that are not deleted", ("state",))
RUNS_EXPORTED = Family("foreshock_exporter_runs_exported", "Running runs that are exported")
RUNS_CUT = Family(
    "foreshock_exporter_runs_cut", "Running runs beyond FORESHOCK_EXPORTER_MAX_RUNS, which are not exported"
)
BUILD_INFO = Family(
    "foreshock_build_info", "The service's version, and the address of its pages", ("version", "public_url")
)

JOBS = Family("foreshock_probe_jobs", "Probe jobs", ("accelerator", "state"))
OLDEST_WAITING = Family(
    "foreshock_probe_job_oldest_waiting_seconds", "Waiting time of the oldest queued job", ("accelerator",)
)
JOB_FAILURES = Family(
    "foreshock_probe_job_failures",
    "Tries of probe jobs that failed or whose lease expired",
    ("accelerator",),
    "counter",
)
WORKERS = Family("foreshock_workers", f"Live workers: seen in the last {LIVE_MINUTES} minutes", ("accelerator",))

FAMILIES: tuple[Family, ...] = (
    BUILD_INFO, RUNS, RUNS_EXPORTED, RUNS_CUT, RUN_INFO, STEP, STEP_SHARDS, STEP_EXPECTED_SHARDS,
    LAST_SEEN, LAST_INGEST, ROLLOUTS, TOKENS,
    *OF_COMPARISONS.values(), *AT_LAG_ZERO.values(), *OF_STEPS.values(),
    BUCKET_TOKENS, BUCKET_K3, LINK_SHARE, LINK_K3, ATTRIBUTED_STEP,
    ALERTS_OPEN, VERDICT, REWARD_COLLAPSED, ADVICE_MODE, ADVICE_REVISION, ADVICE_ACKNOWLEDGED, ADVISED_SCALE,
    APPLIED_SCALE,
    JOBS, OLDEST_WAITING, JOB_FAILURES, WORKERS,
)  # fmt: skip


class Scrape:
    """The samples of one scrape, by family, in the order of FAMILIES. prometheus_client collects and writes them."""

    def __init__(self) -> None:
        self._metrics = {family.name: Metric(family.name, family.help, family.kind) for family in FAMILIES}

    def add(self, family: Family, labels: Sequence[str], value: float | None) -> None:
        """Add a sample; None and non-finite values are left out."""
        if value is not None and isfinite(value):
            named = dict(zip(family.labels, labels, strict=True))
            self._metrics[family.name].add_sample(family.sample_name, named, float(value))

    def add_row(self, families: Sequence[Family], labels: Sequence[str], values: Sequence[float | None]) -> None:
        """Add one sample to each family, all with the same labels."""
        for family, value in zip(families, values, strict=True):
            self.add(family, labels, value)

    def merge(self, other: "Scrape") -> None:
        for name, metric in other._metrics.items():
            self._metrics[name].samples.extend(metric.samples)

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in self._metrics.values() if metric.samples)
