"""Tests of the rules: each has a curve that fires it and one that does not; duration, hysteresis and cooldown hold."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from foreshock.early_warning.default_rules import K3, default_rules
from foreshock.early_warning.detectors import WarningConfiguration
from foreshock.early_warning.rules import ThresholdRule
from foreshock.measures.registry import MEASURES
from tests.foreshock.early_warning.curves import LENGTH, closed_steps, fired, noisy, watch

DEFAULT_RULES = default_rules()


def flat(level: float, steps: int = 60) -> np.ndarray:
    return np.full(steps, level)


def rise(before: float, after: float, at: int = 30, steps: int = 60) -> np.ndarray:
    return np.concatenate([flat(before, at), flat(after, steps - at)])


REACHED = {
    "mismatch_warning": (K3, flat(2e-3)),
    "mismatch_critical": (K3, flat(2e-2)),
    "mismatch_rise": (K3, rise(5e-5, 4e-4)),
    "mismatch_runaway": (K3, rise(5e-4, 2e-2)),
    "mismatch_baseline_critical": (K3, flat(2e-2)),
    "probability_difference": ("trainer/rollout:rollout_probs_diff_mean", flat(0.02)),
    "multiplicative_error_warning": ("trainer/rollout:token_mult_prob_error", flat(1.07)),
    "multiplicative_error_critical": ("trainer/rollout:token_mult_prob_error", flat(1.2)),
    "tail_heavy": ("trainer/rollout:tail_2", flat(0.2)),
    "effective_sample_size_low": ("trainer/rollout:ess_token", flat(0.1)),
    "scores_identical": ("trainer/rollout:max_abs_d", flat(0.0)),
    "gradient_rise": ("scalars:grad_norm", rise(0.4, 2.0)),
    "entropy_fall": ("rollout:entropy_mean", rise(0.3, 0.02)),
    "length_fall": (LENGTH, rise(1700.0, 100.0)),
    "truncation_high": ("rollout:truncated_fraction", flat(0.8)),
    "log_probs_not_finite": ("rollout:nonfinite_log_probs", flat(3.0)),
}
SILENT = {
    "mismatch_warning": noisy(flat(5e-4), 0.2),
    "mismatch_critical": flat(5e-3),
    # The noise of a tiny healthy run: the noise is part of the threshold.
    "mismatch_rise": noisy(flat(3e-5), 0.9),
    # Bad from the start: an absolute crossing alone is not enough.
    "mismatch_runaway": flat(2e-2),
    "mismatch_baseline_critical": flat(5e-3),
    "probability_difference": flat(0.007),
    "multiplicative_error_warning": flat(1.03),
    "multiplicative_error_critical": flat(1.07),
    "tail_heavy": flat(0.01),
    "effective_sample_size_low": flat(0.9),
    "scores_identical": flat(1e-3),
    "gradient_rise": noisy(flat(0.4), 0.4),
    "entropy_fall": rise(0.3, 0.1),
    "length_fall": rise(1700.0, 800.0),
    "truncation_high": flat(0.35),
    "log_probs_not_finite": flat(0.0),
}


def test_every_rule_has_a_firing_and_a_silent_case() -> None:
    names = {rule.name for rule in DEFAULT_RULES}
    assert len(names) == len(DEFAULT_RULES)
    assert names == set(REACHED) == set(SILENT)


@pytest.mark.parametrize("name", sorted(REACHED))
def test_rule_fires(name: str) -> None:
    key, curve = REACHED[name]
    _, events = watch(closed_steps({key: curve}))
    assert name in {event.rule for event in events}


@pytest.mark.parametrize("name", sorted(SILENT))
def test_rule_stays_silent(name: str) -> None:
    key, _ = REACHED[name]
    _, events = watch(closed_steps({key: SILENT[name]}))
    assert name not in {event.rule for event in events}


@pytest.mark.parametrize("name", sorted(REACHED))
def test_rule_fires_once_and_gives_its_reason(name: str) -> None:
    key, curve = REACHED[name]
    _, events = watch(closed_steps({key: curve}))
    mine = [event for event in events if event.rule == name]
    assert len(mine) == 1
    assert mine[0].why
    assert mine[0].what_to_do
    assert mine[0].evidence["source"]


PATIENT = [rule.name for rule in DEFAULT_RULES if rule.minimum_duration > 1]


@pytest.mark.parametrize("name", PATIENT)
def test_single_outlier_does_not_fire_rules_with_a_duration(name: str) -> None:
    key, curve = REACHED[name]
    calm = SILENT[name].copy() if name != "mismatch_runaway" else flat(5e-4)
    calm[40] = curve[-1]
    _, events = watch(closed_steps({key: calm}))
    assert name not in {event.rule for event in events}


def watched(rule: ThresholdRule, curve: list[float]) -> list[tuple[str, int, int]]:
    _, events = watch(closed_steps({rule.key: curve}), WarningConfiguration(rules=(rule,)))
    return [(event.change, event.step, event.fired_step) for event in events]


RULE = ThresholdRule(
    name="test", key="scalars:x", severity="warning", why="w", what_to_do="d", source="s",
    absolute=1.0, minimum_duration=3, cooldown_steps=10,
)  # fmt: skip


def test_minimum_duration_hysteresis_and_cooldown() -> None:
    up, hover, down = 2.0, 0.9, 0.5
    assert watched(RULE, [up, up, down, up, up, down]) == []
    assert watched(RULE, [up] * 3) == [("fired", 3, 3)]
    # 0.9 is below the threshold and within the hysteresis band: it neither fires nor clears.
    assert watched(RULE, [up] * 3 + [hover] * 20 + [up] * 5) == [("fired", 3, 3)]
    assert watched(RULE, [up] * 3 + [down] * 3) == [("fired", 3, 3), ("cleared", 6, 3)]
    # Cleared at 6: the cooldown lasts to step 16.
    again = [up] * 3 + [down] * 3 + [up] * 14
    assert watched(RULE, again) == [("fired", 3, 3), ("cleared", 6, 3), ("fired", 17, 17)]


def test_missing_values_count_for_neither_side() -> None:
    nan = float("nan")
    assert watched(RULE, [2.0, nan, 2.0, nan, nan, 2.0]) == [("fired", 6, 6)]
    assert watched(RULE, [2.0] * 3 + [nan] * 20) == [("fired", 3, 3)]


def test_absolute_rule_that_moves_the_learning_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="moves the learning rate and has no relative threshold"):
        replace(RULE, moves_learning_rate=True)
    with pytest.raises(ValueError, match="no threshold"):
        replace(RULE, absolute=None)
    assert all(rule.relative is not None for rule in DEFAULT_RULES if rule.moves_learning_rate)


def test_constant_high_mismatch_alerts_without_moving_the_learning_rate() -> None:
    _, events = watch(closed_steps({K3: noisy(flat(5e-2, 300), 0.3)}))
    assert {"mismatch_critical", "mismatch_baseline_critical"} <= {event.rule for event in events}
    assert not any(event.moves_learning_rate for event in events)


def test_lagging_rollouts_skip_absolute_rules_and_use_the_baseline_of_equal_lag() -> None:
    lag = np.r_[flat(0.0, 30), flat(4.0, 70)]
    k3 = np.r_[flat(5e-4, 30), flat(8e-3, 40), flat(8e-2, 30)]
    _, events = watch(closed_steps({K3: k3, "rollout:lag_mean": lag}))
    names = dict(fired(events))
    assert "mismatch_critical" not in names
    # The tenfold higher value at lag 4 is the baseline of that lag; only a rise above it fires.
    assert names["mismatch_runaway"] == 73
    assert names["mismatch_rise"] == 75


def test_mixture_of_experts_has_its_own_ranges() -> None:
    steps = closed_steps({K3: flat(5e-3)})
    dense = {event.rule for event in watch(steps)[1]}
    experts = {event.rule for event in watch(steps, WarningConfiguration.for_model("moe"))[1]}
    assert "mismatch_warning" in dense
    assert experts == set()
    assert [rule.name for rule in default_rules("moe")] == [rule.name for rule in DEFAULT_RULES]


def test_configuration_digest_changes_with_any_constant() -> None:
    plain = WarningConfiguration()
    surge = replace(plain, surge=replace(plain.surge, early_surge_step=21))
    rules = replace(plain, rules=(*plain.rules[:-1], replace(plain.rules[-1], absolute=1.0)))
    assert len({plain.digest(), surge.digest(), rules.digest(), WarningConfiguration.for_model("moe").digest()}) == 4
    assert plain.digest() == WarningConfiguration().digest()
    assert all(dataclasses.is_dataclass(rule) for rule in plain.rules)


def test_every_quantity_of_the_rules_is_a_registered_measure_or_a_scalar() -> None:
    columns = {measure.column for measure in MEASURES}
    for key in WarningConfiguration().keys:
        comparison, _, measure = key.partition(":")
        assert comparison in ("rollout", "trainer/rollout", "scalars")
        assert comparison == "scalars" or measure in columns, key
