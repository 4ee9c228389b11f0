"""The published ranges, word by word."""

from __future__ import annotations

import math

import pytest

from foreshock.commands.verdicts import Verdict, verdict_of, worst


@pytest.mark.parametrize(
    ("measure", "value", "dense", "moe"),
    [
        ("k3_kl", 5e-4, "healthy", "healthy"),
        ("k3_kl", 1e-3, "healthy", "healthy"),
        ("k3_kl", 5e-3, "look", "healthy"),
        ("k3_kl", 5e-2, "bad", "look"),
        ("k3_kl", 0.5, "bad", "bad"),
        ("k3_kl", math.nan, "unknown", "unknown"),
        ("rollout_probs_diff_mean", 0.004, "healthy", "healthy"),
        ("rollout_probs_diff_mean", 0.02, "look", "look"),
        ("token_mult_prob_error", 1.05, "healthy", "healthy"),
        ("token_mult_prob_error", 1.08, "look", "look"),
        ("token_mult_prob_error", 1.2, "bad", "bad"),
        ("tail_2", 0.005, "healthy", "healthy"),
        ("tail_2", 0.05, "look", "look"),
        ("tail_2", 0.2, "bad", "bad"),
        ("response_length_mean", 1e9, "unknown", "unknown"),
    ],
)
def test_the_verdict_on_a_value(measure: str, value: float, dense: Verdict, moe: Verdict) -> None:
    assert verdict_of(measure, value) == dense
    assert verdict_of(measure, value, "moe") == moe


def test_the_gravest_counts() -> None:
    assert worst(["healthy", "bad", "look"]) == "bad"
    assert worst(["unknown", "healthy"]) == "healthy"
    assert worst([]) == "unknown"
