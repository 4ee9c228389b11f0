"""Health: a run is "healthy" only if the whole interval is in the healthy range."""

from __future__ import annotations

import dataclasses
import math

import pytest

from foreshock.diagnosis.health import HealthEvidence, PooledMeasure, conclude_health, step_verdict
from foreshock.model_kind import ModelKind

QUIET = (
    PooledMeasure("rollout_probs_diff_mean", 0.001, 0.0008, 0.0013),
    PooledMeasure("token_mult_prob_error", 1.01, 1.005, 1.02),
    PooledMeasure("tail_2", 0.001, 0.0, 0.002),
)


def evidence(mean: float, low: float, high: float, **changes: object) -> HealthEvidence:
    whole = HealthEvidence(
        first_step=31,
        last_step=40,
        steps=10,
        tokens=12_800,
        clusters=80,
        measures=(PooledMeasure("k3_kl", mean, low, high, reliable="unreliable" not in changes), *QUIET),
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def test_interval_inside_the_range_is_healthy() -> None:
    health = conclude_health(evidence(5e-4, 3e-4, 8e-4))
    assert health.verdict == "healthy"
    (sentence,) = health.sentences
    assert sentence == (
        "Healthy: k3 of trainer/rollout, pooled over steps 31 to 40, is 5.0e-4 (95 % interval 3.0e-4 to "
        "8.0e-4 over 80 prompts)."
    )


def test_interval_that_reaches_beyond_the_range_is_healthy_so_far() -> None:
    health = conclude_health(evidence(5e-4, 1e-4, 4e-3))
    assert health.verdict == "healthy so far"
    assert health.sentences[0].startswith("Healthy so far: ")
    assert health.sentences[0].endswith(", could be up to 4.0e-3.")


def test_too_few_prompts_for_an_interval_are_not_healthy() -> None:
    health = conclude_health(evidence(5e-4, math.nan, math.nan))
    assert health.verdict == "healthy so far"
    assert "no interval: too few prompts" in health.sentences[0]


def test_another_measure_with_a_wide_interval_is_named() -> None:
    wide = PooledMeasure("token_mult_prob_error", 1.02, 1.0, 1.3)
    health = conclude_health(
        evidence(5e-4, 3e-4, 8e-4, measures=(PooledMeasure("k3_kl", 5e-4, 3e-4, 8e-4, reliable=True), wide))
    )
    assert health.verdict == "healthy so far"
    assert health.sentences[0].endswith("could be up to 1.3 (E[exp |d|]).")


def test_worst_measure_decides_and_is_named() -> None:
    measures = (PooledMeasure("k3_kl", 5e-4, 3e-4, 8e-4), PooledMeasure("token_mult_prob_error", 1.849, 1.5, 2.4))
    health = conclude_health(evidence(0, 0, 0, measures=measures))
    assert health.verdict == "critical"
    assert health.sentences[0].startswith("Critical (E[exp |d|] is 1.849, critical > 1.1): k3 of trainer/rollout")


@pytest.mark.parametrize(("model_kind", "verdict"), [(None, "warning"), ("dense", "warning"), ("moe", "healthy")])
def test_mixture_of_experts_has_its_own_range(model_kind: ModelKind | None, verdict: str) -> None:
    assert conclude_health(evidence(5e-3, 4e-3, 6e-3, model_kind=model_kind)).verdict == verdict


def test_fault_that_the_lint_found_is_not_healthy() -> None:
    health = conclude_health(evidence(5e-4, 3e-4, 8e-4, faults=("the mask drops a sampled token",)))
    assert health.verdict == "warning"
    assert health.sentences[-1] == "The lint found in these steps: the mask drops a sampled token."


def test_unreliable_interval_is_not_healthy() -> None:
    health = conclude_health(evidence(5e-4, 3e-4, 8e-4, unreliable="The tail is heavy."))
    assert (health.verdict, health.sentences[-1]) == ("healthy so far", "The tail is heavy.")
    assert "(resampling range 3.0e-4 to 8.0e-4 over" in health.sentences[0]
    assert "95 %" not in health.sentences[0]
    # The range ends within the range: it does not say how large the mean could be.
    assert "could be" not in health.sentences[0]


def test_verdict_on_a_step_is_that_of_its_worst_measure() -> None:
    values = {"k3_kl": 5e-4, "k3_kl_bootstrap_high": 8e-4, "token_mult_prob_error": 1.01, "tail_2": 0.0}
    assert step_verdict(values, None) == "healthy"
    assert step_verdict(values | {"token_mult_prob_error": 1.849}, None) == "critical"
    assert step_verdict(values | {"k3_kl_bootstrap_high": 2e-3}, None) == "healthy so far"
    heavy = {"prompt_groups": 8.0, "pareto_k": 0.42, "pareto_k_inverse": 0.1}
    assert step_verdict(values | heavy, None) == "healthy so far"
    assert step_verdict({"k3_kl": 5e-4}, None) == "healthy so far"
    assert step_verdict({}, None) == "unknown"
