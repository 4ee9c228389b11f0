"""The published ranges, word by word."""

import math

import pytest

from foreshock.healthy_ranges import Verdict, verdict_of, worst


@pytest.mark.parametrize(
    ("measure", "value", "dense", "moe"),
    [
        ("k3_kl", 5e-4, "healthy", "healthy"), ("k3_kl", 1e-3, "healthy", "healthy"),
        ("k3_kl", 5e-3, "warning", "healthy"), ("k3_kl", 5e-2, "critical", "warning"),
        ("k3_kl", 0.5, "critical", "critical"), ("k3_kl", math.nan, "unknown", "unknown"),
        ("mean_abs_d", 0.03, "healthy", "healthy"), ("mean_abs_d", 0.07, "warning", "healthy"),
        ("rollout_probs_diff_mean", 0.07, "warning", "healthy"), ("token_mult_prob_error", 1.05, "healthy", "healthy"),
        ("token_mult_prob_error", 1.08, "warning", "healthy"), ("token_mult_prob_error", 1.2, "critical", "warning"),
        ("tail_2", 0.005, "healthy", "healthy"), ("tail_2", 0.05, "warning", "warning"),
        ("tail_2", 0.2, "critical", "critical"), ("response_length_mean", 1e9, "unknown", "unknown"),
    ],
)  # fmt: skip
def test_verdict_of_a_value(measure: str, value: float, dense: Verdict, moe: Verdict) -> None:
    assert verdict_of(measure, value, None) == dense
    assert verdict_of(measure, value, "dense") == dense
    assert verdict_of(measure, value, "moe") == moe


def test_worst_verdict_counts() -> None:
    assert worst(["healthy", "critical", "warning"]) == "critical"
    assert worst(["unknown", "healthy"]) == "healthy"
    assert worst([]) == "unknown"
