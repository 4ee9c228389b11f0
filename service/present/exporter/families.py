"""Every metric that /metrics shows: its name, its help and its labels. To change a label or a metric, change it here.

Labels are bounded: run, comparison, bucket, link, accelerator, rule and severity, states. A step, a rollout or a token
is never a label; the newest step is a value (`foreshock_step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from service.replay.workers.service import LIVE_MINUTES

Kind = Literal["gauge", "counter"]
Samples = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True, slots=True)
class Family:
    """A metric; `labels` in the order in which samples give their values."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"

    def samples(self) -> Samples:
        """The family without samples, to be filled in one scrape."""
        kind = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        return kind(self.name, self.help, labels=self.labels)


_OF_COMPARISON = ("run", "comparison")

# Column of the wide table → metric. Newest step of the run that has the comparison.
OF_COMPARISONS: dict[str, Family] = {
    "k3_kl": Family("foreshock_k3_kl_nats", "Mismatch: token mean of k3, KL(behaviour‖target)", _OF_COMPARISON),
    "kl": Family("foreshock_kl_nats", "Mismatch: token mean of -d (k1), KL(behaviour‖target)", _OF_COMPARISON),
    "mean_abs_d": Family(
        "foreshock_log_prob_difference_abs_nats", "Token mean of |log target - log behaviour|", _OF_COMPARISON
    ),
    "max_abs_d": Family(
        "foreshock_log_prob_difference_max_nats", "Largest |log target - log behaviour| of a token", _OF_COMPARISON
    ),
    "mean_ratio": Family("foreshock_mean_ratio", "Token mean of target/behaviour; 1 is ideal", _OF_COMPARISON),
    "chi2_token": Family("foreshock_chi2_token", "Token mean of (ratio - 1)^2", _OF_COMPARISON),
    "token_mult_prob_error": Family(
        "foreshock_token_mult_prob_error", "Token mean of exp|d|; 1 is ideal, above 1.05 suspicious", _OF_COMPARISON
    ),
    "ess_token": Family(
        "foreshock_ess_token_ratio", "Effective sample size of token weights, as a fraction", _OF_COMPARISON
    ),
    "rollout_probs_diff_mean": Family(
        "foreshock_probability_difference_mean", "Token mean of |target - behaviour| as probabilities", _OF_COMPARISON
    ),
    "tail_2": Family("foreshock_tail_2_ratio", "Tokens whose ratio is beyond 2 or 1/2, as a fraction", _OF_COMPARISON),
    "reverse_chi2_token": Family(
        "foreshock_reverse_chi2_token",
        "Token mean of (1 - ratio)^2/ratio: where the target lost tokens",
        _OF_COMPARISON,
    ),
    "tail_asymmetry_ln2": Family(
        "foreshock_tail_asymmetry_ln2", "P(ratio < 1/2) less the weight of ratio > 2; may be negative", _OF_COMPARISON
    ),
    "pareto_k": Family(
        "foreshock_pareto_k",
        "Shape of the ratios' tail; above 0.7 their means mislead where ratios reach e",
        _OF_COMPARISON,
    ),
    "ess_seq_predicted": Family(
        "foreshock_ess_sequence_predicted_ratio", "exp(-2 KL T): effective size of sequence weights", _OF_COMPARISON
    ),
    "advantage_d_cov": Family(
        "foreshock_advantage_d_covariance", "Covariance of advantage and d over tokens", _OF_COMPARISON
    ),
    "advantage_skew": Family(
        "foreshock_advantage_skew", "Token mean of advantage times (ratio - 1); 0 is unskewed", _OF_COMPARISON
    ),
    "bad_update_fraction": Family(
        "foreshock_bad_update_ratio", "Tokens pushed down although the target is far below already", _OF_COMPARISON
    ),
    "k3_kl_per_entropy": Family(
        "foreshock_k3_kl_per_entropy", "k3 over entropy: steadier than k3 as entropy falls", _OF_COMPARISON
    ),
    "nonfinite_target": Family(
        "foreshock_nonfinite_target_log_probs", "Target log-probs that are NaN or infinite", _OF_COMPARISON
    ),
    "nonfinite_behaviour": Family(
        "foreshock_nonfinite_behaviour_log_probs", "Behaviour log-probs that are NaN or infinite", _OF_COMPARISON
    ),
}

# Column of the wide table → metric. The newest closed step of the run.
OF_STEPS: dict[str, Family] = {
    "response_length_mean": Family("foreshock_response_length_mean_tokens", "Mean response length", ("run",)),
    "response_length_p50": Family("foreshock_response_length_p50_tokens", "Median response length", ("run",)),
    "response_length_p90": Family("foreshock_response_length_p90_tokens", "90th percentile of lengths", ("run",)),
    "response_length_p99": Family("foreshock_response_length_p99_tokens", "99th percentile of lengths", ("run",)),
    "response_length_max": Family("foreshock_response_length_max_tokens", "Longest response", ("run",)),
    "truncated_fraction": Family("foreshock_truncated_ratio", "Responses that hit the cap, as a fraction", ("run",)),
    "reward_mean": Family("foreshock_reward_mean", "Mean reward", ("run",)),
    "entropy_mean": Family("foreshock_entropy_mean_nats", "Token mean of the logged entropy", ("run",)),
    "lag_mean": Family("foreshock_lag_mean_versions", "Token mean of how old the sampling weights are", ("run",)),
    "nonfinite_log_probs": Family(
        "foreshock_nonfinite_log_probs", "Logged log-probs of the newest step that are NaN or infinite", ("run",)
    ),
}

RUN_INFO = Family(
    "foreshock_run_info",
    "A running run; model_kind is dense, moe or empty (unknown)",
    ("run", "project", "key", "name", "model", "model_kind"),
)
STEP = Family("foreshock_step", "The newest closed step", ("run",))
LAST_INGEST = Family(
    "foreshock_last_ingest_timestamp_seconds", "When rollouts of the run came last, Unix time", ("run",)
)
ROLLOUTS = Family("foreshock_ingested_rollouts", "Rollouts that came", ("run",), "counter")
TOKENS = Family("foreshock_ingested_tokens", "Response tokens that came", ("run",), "counter")

BUCKET_TOKENS = Family(
    "foreshock_bucket_tokens", "Tokens by their probability under the behaviour score", ("run", "comparison", "bucket")
)
BUCKET_K3 = Family(
    "foreshock_bucket_k3_kl_nats", "k3 by the token's probability under the behaviour", ("run", "comparison", "bucket")
)
LINK_SHARE = Family(
    "foreshock_link_share_ratio", "A link's share of the mismatch, E[d_link d]/E[d^2]; may be negative", ("run", "link")
)
LINK_K3 = Family("foreshock_link_k3_kl_nats", "k3 of a link of the chain", ("run", "link"))
ATTRIBUTED_STEP = Family("foreshock_attributed_step", "The newest step whose mismatch was attributed", ("run",))

ALERTS_OPEN = Family("foreshock_alerts_open", "Open alerts", ("run", "rule", "severity"))
ADVICE_MODE = Family("foreshock_advice_mode", "1 for the mode that the run is in", ("run", "mode"))
ADVICE_REVISION = Family("foreshock_advice_revision", "Revision of the newest advice", ("run",))
ADVICE_ACKNOWLEDGED = Family(
    "foreshock_advice_acknowledged_revision", "Revision of the advice that the trainer said it follows", ("run",)
)
ADVISED_SCALE = Family(
    "foreshock_learning_rate_advised_scale", "What the learning rate should be multiplied by", ("run",)
)
APPLIED_SCALE = Family(
    "foreshock_learning_rate_applied_scale",
    "The learning rate the trainer said it used, over the run's initial one (its own schedule included)",
    ("run",),
)

RUNS = Family("foreshock_runs", "Runs that were not deleted", ("state",))
RUNS_EXPORTED = Family("foreshock_exporter_runs_exported", "Running runs that are exported")
RUNS_CUT = Family(
    "foreshock_exporter_runs_cut", "Running runs that are not exported, because there are more than the limit"
)
BUILD_INFO = Family("foreshock_build_info", "The service's version", ("version",))

JOBS = Family("foreshock_probe_jobs", "Probe jobs", ("accelerator", "state"))
OLDEST_WAITING = Family(
    "foreshock_probe_job_oldest_waiting_seconds", "How long the oldest queued job waits", ("accelerator",)
)
JOB_FAILURES = Family(
    "foreshock_probe_job_failures", "Tries of probe jobs that failed or fell silent", ("accelerator",), "counter"
)
WORKERS = Family("foreshock_workers", f"Live workers: seen in the last {LIVE_MINUTES} minutes", ("accelerator",))

FAMILIES: tuple[Family, ...] = (
    BUILD_INFO, RUNS, RUNS_EXPORTED, RUNS_CUT, RUN_INFO, STEP, LAST_INGEST, ROLLOUTS, TOKENS,
    *OF_COMPARISONS.values(), *OF_STEPS.values(), BUCKET_TOKENS, BUCKET_K3, LINK_SHARE, LINK_K3, ATTRIBUTED_STEP,
    ALERTS_OPEN, ADVICE_MODE, ADVICE_REVISION, ADVICE_ACKNOWLEDGED, ADVISED_SCALE, APPLIED_SCALE,
    JOBS, OLDEST_WAITING, JOB_FAILURES, WORKERS,
)  # fmt: skip


def exposed_names() -> set[str]:
    """The names as Prometheus stores them: a counter's with `_total`."""
    return {family.name + ("_total" if family.kind == "counter" else "") for family in FAMILIES}
