"""Tests of the rules: each has values that fire it, that clear it and that do neither; duration and cooldown hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.mismatch_rules import K3, LOW_PROBABILITY_ABS_D, NOISE_FLOOR
from foreshock.diagnosis.rule import Baseline, Direction, Event, ThresholdRule
from foreshock.measures.registry import MEASURES
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, fired, noisy, watch

DEFAULT_RULES = default_rules()


def flat(level: float, steps: int = 60) -> np.ndarray:
    return np.full(steps, level)


def rise(before: float, after: float, at: int = 30, steps: int = 90) -> np.ndarray:
    return np.concatenate([flat(before, at), flat(after, steps - at)])


PAIR = "trainer/rollout"
NORMAL = np.random.default_rng(1).normal(size=400)


@dataclasses.dataclass(frozen=True)
class Case:
    """A quantity's values that fire a rule, values that do not, and values after which a firing rule clears."""

    key: str
    fires: np.ndarray
    silent: np.ndarray
    clears: float
    # Further quantities that the rule reads, the same at every step.
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def steps(self, curve: np.ndarray) -> list[ClosedStep]:
        return [replace(row, values={**row.values, **self.others}) for row in closed_steps({self.key: curve})]


CASES = {
    "mismatch_warning": Case(K3, flat(2e-3), noisy(flat(5e-4), 0.2), 5e-4),
    "mismatch_critical": Case(K3, flat(2e-2), flat(5e-3), 5e-4),
    "mismatch_step": Case(K3, flat(2e-2), flat(5e-3), 5e-4),
    # The noise of a tiny healthy run: the noise is part of the threshold.
    "mismatch_rise": Case(K3, rise(5e-5, 1e-3), noisy(flat(3e-5), 0.9), 5e-5),
    # Bad from the start: an absolute crossing alone is not enough.
    "mismatch_runaway": Case(K3, rise(5e-4, 2e-2), flat(2e-2), 5e-4),
    "mismatch_above_noise_floor": Case(K3, flat(5e-4), flat(5e-5), 5e-5, {NOISE_FLOOR: 1e-5}),
    "mismatch_baseline_critical": Case(K3, flat(2e-2), flat(5e-3), 1e-3),
    # Few tokens a step: as noisy as in a tiny run.
    "low_probability_rise": Case(f"{PAIR}:low_probability_abs_d", rise(0.03, 0.15), noisy(flat(0.03), 0.6), 0.03),
    "mismatch_per_entropy_warning": Case(f"{PAIR}:k3_kl_per_entropy", flat(0.06), flat(0.02), 0.01),
    "mismatch_per_entropy_critical": Case(f"{PAIR}:k3_kl_per_entropy", flat(0.6), flat(0.2), 0.01),
    "mismatch_per_entropy_rise": Case(f"{PAIR}:k3_kl_per_entropy", rise(1e-3, 0.02), noisy(flat(1e-3), 0.9), 1e-3),
    "chi2_high": Case(f"{PAIR}:chi2_token", flat(2e-2), flat(3e-3), 1e-3),
    "reverse_chi2_high": Case(f"{PAIR}:reverse_chi2_token", flat(2e-2), flat(3e-3), 1e-3),
    "absolute_difference": Case(f"{PAIR}:mean_abs_d", flat(0.07), flat(0.04), 0.01),
    "tail_heavy": Case(f"{PAIR}:tail_2", flat(0.2), flat(0.01), 0.01),
    "tail_asymmetry": Case(f"{PAIR}:tail_asymmetry_ln2", flat(-0.02), flat(-0.002), 0.001),
    "effective_sample_size_low": Case(f"{PAIR}:ess_token", flat(0.1), flat(0.9), 0.99),
    "effective_sample_size_fall": Case(f"{PAIR}:ess_token", rise(0.999, 0.6), flat(0.95), 0.999),
    "mean_ratio_off": Case(f"{PAIR}:mean_ratio", flat(0.902), flat(0.998), 0.999),
    "surprisal_off": Case(f"{PAIR}:surprisal_z", flat(-2.5), NORMAL, 0.1, {f"{PAIR}:prompt_groups": 32.0}),
    "scores_identical": Case(f"{PAIR}:max_abs_d", flat(0.0), flat(1e-3), 1e-3),
    "gradient_rise": Case("scalars:grad_norm", rise(0.4, 2.0), noisy(flat(0.4), 0.4), 0.4),
    "entropy_fall": Case("rollout:entropy_mean", rise(0.3, 0.02), rise(0.3, 0.1), 0.3),
    "entropy_rise": Case("rollout:entropy_mean", rise(0.3, 1.2), rise(0.3, 0.6), 0.3),
    "perplexity_rise": Case(f"{PAIR}:training_ppl", rise(1.4, 9.0), noisy(flat(1.4), 0.1), 1.4),
    "advantage_covariance": Case(f"{PAIR}:advantage_d_cov", rise(5e-5, -0.01), rise(5e-5, 1e-3), 5e-5),
    "advantage_skew": Case(f"{PAIR}:advantage_skew", rise(-5e-5, 0.01), rise(5e-5, 1e-3), 5e-5),
    "length_fall": Case(LENGTH, rise(1700.0, 100.0), rise(1700.0, 800.0), 1700.0),
    "truncation_high": Case("rollout:truncated_fraction", flat(0.8), flat(0.35), 0.1),
    "weights_differ": Case("scalars:notary/engines_off", flat(1.0), flat(0.0), 0.0),
    "lag_high": Case("rollout:lag_mean", flat(12.0), flat(4.0), 2.0),
    "log_probs_not_finite": Case("rollout:nonfinite_log_probs", flat(3.0), flat(0.0), 0.0),
}


def test_every_rule_has_a_firing_a_silent_and_a_clearing_case() -> None:
    names = {rule.name for rule in DEFAULT_RULES}
    assert len(names) == len(DEFAULT_RULES)
    assert names == set(CASES)


def changes(name: str, curve: np.ndarray) -> list[Event]:
    _, events = watch(CASES[name].steps(curve))
    return [event for event in events if event.rule == name]


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_fires_once_and_gives_its_reason(name: str) -> None:
    (event,) = changes(name, CASES[name].fires)
    assert event.change == "fired"
    assert event.why
    assert event.what_to_do
    assert event.evidence["source"]
    assert event.evidence["cause"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_stays_silent(name: str) -> None:
    assert changes(name, CASES[name].silent) == []


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_clears_when_the_values_are_back(name: str) -> None:
    case = CASES[name]
    fired, cleared = changes(name, np.concatenate([case.fires, flat(case.clears, 20)]))
    assert (fired.change, cleared.change) == ("fired", "cleared")
    assert cleared.fired_step == fired.step
    # The steps in a row that the rule wants, and no more; the median of five is back with the third value.
    (rule,) = [rule for rule in DEFAULT_RULES if rule.name == name]
    assert cleared.step == len(case.fires) + (3 if rule.pooled == "median" else rule.minimum_duration)


def test_a_rule_that_needs_prompt_groups_is_silent_with_few_or_an_unknown_number() -> None:
    for others in ({}, {f"{PAIR}:prompt_groups": 8.0}):
        case = replace(CASES["surprisal_off"], others=others)
        _, events = watch(case.steps(case.fires))
        assert events == []


PATIENT = [rule.name for rule in DEFAULT_RULES if rule.minimum_duration > 1 or rule.pooled]


@pytest.mark.parametrize("name", PATIENT)
def test_single_outlier_does_not_fire_rules_that_need_several_steps(name: str) -> None:
    case = CASES[name]
    calm = case.silent.copy() if name != "mismatch_runaway" else flat(5e-4)
    calm[40] = case.fires[-1] if not name.startswith("mismatch") else 100.0
    assert changes(name, calm) == []


@pytest.mark.parametrize("seed", range(3))
def test_pooled_rule_keeps_its_run_length_at_the_threshold(seed: int) -> None:
    # Heavy-tailed values whose mean is the threshold: the worst that the rule may not fire at.
    values = 1e-3 * np.random.default_rng(seed).lognormal(-0.5 * 1.5**2, 1.5, size=2_000)
    rule = replace(next(rule for rule in DEFAULT_RULES if rule.name == "mismatch_warning"))
    assert len(watched(rule, list(values))) <= 1


def test_rules_of_one_cause_are_one_episode() -> None:
    curve = np.concatenate([flat(2e-2, 30), flat(1e-4, 30), flat(2e-2, 30)])
    _, events = watch(
        closed_steps({K3: curve, f"{PAIR}:chi2_token": 2.0 * curve, "rollout:nonfinite_log_probs": curve})
    )
    mismatch = [event for event in events if event.change == "fired" and event.evidence["cause"] == "mismatch"]
    assert len(mismatch) >= 6
    first = [event.evidence["episode"] for event in mismatch if event.step <= 30]
    second = [event.evidence["episode"] for event in mismatch if event.step > 60]
    assert set(first) == {mismatch[0].step}
    assert len(set(second)) == 1
    assert second[0] == min(event.step for event in mismatch if event.step > 60)
    (data,) = {event.evidence["episode"] for event in events if event.evidence.get("cause") == "data"}
    assert data == 1


def watched(rule: ThresholdRule, curve: list[float]) -> list[tuple[str, int, int]]:
    _, events = watch(closed_steps({rule.key: curve}), WarningConfiguration(rules=(rule,)))
    return [(event.change, event.step, event.fired_step) for event in events if event.rule == rule.name]


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


def test_median_rule_needs_three_of_five_values_beyond() -> None:
    rule = replace(RULE, pooled="median")
    up, down = 2.0, 0.5
    assert watched(rule, [down, up, up, down, down] * 6) == []
    assert watched(rule, [down, down, up, up, up]) == [("fired", 5, 5)]
    # Too few values for a median, however large they are.
    assert watched(rule, [9.0] * 4) == []
    # It clears as it fires, with the third value, and then waits: the cooldown of 10 lasts to step 18.
    assert watched(rule, [up] * 5 + [down] * 3) == [("fired", 5, 5), ("cleared", 8, 5)]
    assert watched(rule, [up] * 5 + [down] * 3 + [up] * 12)[2:] == [("fired", 19, 19)]


def test_median_rule_allows_for_the_noise_of_a_median() -> None:
    rule = replace(RULE, absolute=None, relative=1.01)
    baseline = Baseline(tuple(0.5 * NORMAL[:10]))
    single, of_median = rule.threshold(baseline), replace(rule, pooled="median").threshold(baseline)
    assert single is not None
    assert of_median is not None
    drawn = np.random.default_rng(4).normal(size=(100_000, 5))
    assert math.log(of_median / baseline.level) / math.log(single / baseline.level) == pytest.approx(
        np.median(drawn, axis=1).std(), rel=0.01
    )


def test_missing_values_count_for_neither_side() -> None:
    nan = float("nan")
    assert watched(RULE, [2.0, nan, 2.0, nan, nan, 2.0]) == [("fired", 6, 6)]
    assert watched(RULE, [2.0] * 3 + [nan] * 20) == [("fired", 3, 3)]


def test_absolute_rule_that_moves_the_learning_rate_is_refused() -> None:
    for effect in ("halve", "hold"):
        with pytest.raises(ValueError, match="an absolute crossing alone never moves the learning rate"):
            replace(RULE, effect=effect)
    with pytest.raises(ValueError, match="no threshold"):
        replace(RULE, absolute=None)
    assert all(rule.relative is not None for rule in DEFAULT_RULES if rule.effect == "halve")


def test_lagging_rollouts_skip_absolute_rules_and_use_the_baseline_of_equal_lag() -> None:
    lag = np.r_[flat(0.0, 30), flat(4.0, 70)]
    k3 = np.r_[flat(5e-4, 30), flat(8e-3, 40), flat(0.8, 30)]
    _, events = watch(closed_steps({K3: k3, "rollout:lag_mean": lag}))
    names = dict(fired(events))
    assert "mismatch_critical" not in names
    # The tenfold higher value at lag 4 is the baseline of that lag; only a rise above it fires.
    assert names["mismatch_runaway"] == 75
    assert names["mismatch_rise"] == 75


def test_rise_at_low_probability_is_a_warning_at_equal_lag_that_moves_nothing() -> None:
    lag = np.r_[flat(0.0, 30), flat(4.0, 70)]
    _, events = watch(closed_steps({LOW_PROBABILITY_ABS_D: rise(0.03, 0.3, at=30, steps=100), "rollout:lag_mean": lag}))
    assert events == []
    _, events = watch(closed_steps({LOW_PROBABILITY_ABS_D: rise(0.03, 0.3, at=30, steps=100)}))
    (event,) = events
    assert (event.rule, event.severity, event.moves_learning_rate) == ("low_probability_rise", "warning", False)
    assert event.evidence["cause"] == "mismatch"


def test_rise_at_low_probability_within_the_healthy_range_of_k3_is_silent() -> None:
    steps = closed_steps({LOW_PROBABILITY_ABS_D: rise(0.003, 0.04)})
    assert watch(steps)[1] == []
    steps = closed_steps({LOW_PROBABILITY_ABS_D: rise(0.03, 0.13)})
    assert [rule for rule, _ in fired(watch(steps)[1])] == ["low_probability_rise"]
    assert watch(steps, WarningConfiguration.for_model("moe"))[1] == []


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
        assert comparison in ("rollout", "trainer/rollout", "scalars", NOISE_FLOOR.partition(":")[0])
        assert comparison == "scalars" or measure in columns, key


@pytest.mark.parametrize("direction", ["below", "above"])
@pytest.mark.parametrize("ideal", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("absolute", [-2.0, -0.5, 0.0, 0.5, 2.0])
def test_a_value_beyond_the_threshold_is_never_back(direction: Direction, ideal: float, absolute: float) -> None:
    rule = replace(RULE, direction=direction, ideal=ideal, absolute=absolute)
    for value in np.linspace(-4.0, 4.0, 161).tolist():
        assert not (rule.is_beyond(value, absolute) and rule.is_back(value, absolute))
    beyond, healthy = (absolute - 0.1, absolute + 10) if direction == "below" else (absolute + 0.1, absolute - 10)
    assert watched(rule, [beyond] * 40) == [("fired", 3, 3)]
    assert watched(rule, [beyond] * 3 + [healthy] * 3) == [("fired", 3, 3), ("cleared", 6, 3)]


def test_an_announced_change_does_not_end_a_rise_that_goes_on() -> None:
    curve = np.concatenate([rise(2e-4, 6e-3, 60, 150), flat(2e-4, 30)])
    steps = [replace(each, rebaseline=each.step == 90) for each in closed_steps({K3: curve})]
    found = [(event.change, event.step) for event in watch(steps)[1] if event.rule == "mismatch_rise"]
    assert [change for change, _ in found] == ["fired", "cleared"]
    assert found[1][1] > 150
