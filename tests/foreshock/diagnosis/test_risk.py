"""Tests of the risk: an order over what stands, corroborated across families, never a probability."""

from __future__ import annotations

import pytest

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.risk import LEVELS, NO_PROBABILITY, RiskLevel, StandingAlert, assess, family_of
from foreshock.severity import Severity


def alert(rule: str, severity: Severity = "warning", step: int = 90) -> StandingAlert:
    return StandingAlert(rule, severity, step)


@pytest.mark.parametrize(
    ("alerts", "level"),
    [
        ([], "calm"),
        ([alert("scores_identical", "info")], "calm"),
        ([alert("length_growth_with_reward", "info")], "watch"),
        ([alert("gradient_rise")], "elevated"),
        ([alert("mismatch_warning"), alert("tail_heavy")], "elevated"),
        ([alert("mismatch_warning"), alert("gradient_rise")], "high"),
        ([alert("length_surge", "critical")], "high"),
        ([alert("length_surge", "critical"), alert("entropy_fall", "info")], "high"),
        ([alert("length_surge", "critical"), alert("reward_fall")], "critical"),
        ([alert("mismatch_critical", "critical"), alert("length_surge", "critical")], "critical"),
    ],
)
def test_level_follows_severity_and_corroboration(alerts: list[StandingAlert], level: RiskLevel) -> None:
    risk = assess(alerts, 100)
    assert risk.level == level
    assert LEVELS[risk.score] == level
    assert risk.reasons


def test_one_more_alert_never_lowers_the_risk() -> None:
    known = [alert("entropy_fall", "info"), alert("gradient_rise"), alert("length_surge", "critical")]
    known += [alert("reward_fall"), alert("mismatch_runaway", "critical")]
    for count in range(len(known)):
        assert assess(known[: count + 1], 100).score >= assess(known[:count], 100).score


def test_surge_counts_as_long_as_a_collapse_may_follow_it() -> None:
    surge = alert("length_surge", "critical", 100)
    assert assess([surge], 300).level == "high"
    assert assess([surge], 301).level == "calm"
    assert assess([alert("mismatch_critical", "critical", 100)], 1000).level == "high"


def test_reasons_name_each_family_once_and_say_that_it_is_no_probability() -> None:
    risk = assess([alert("mismatch_rise", step=3), alert("tail_heavy", "critical", 5), alert("reward_fall")], 100)
    assert risk.reasons == (
        "Mismatch: tail_heavy (critical) since step 5.",
        "Reward: reward_fall (warning) since step 90.",
    )
    assert assess([alert("reward_fall")], 100).reasons[-1] == "No signal of another family corroborates it."
    assert "30 collapses" in NO_PROBABILITY


def test_no_step_is_calm() -> None:
    assert assess([], None).level == "calm"


def test_mismatch_rules_are_one_family() -> None:
    keys = {rule.name for rule in default_rules() if rule.key.startswith("trainer/rollout:")}
    keys -= {"scores_identical"}
    assert {"mismatch_warning", "tail_heavy", "effective_sample_size_low"} <= keys
    assert {family_of(name) for name in ("mismatch_warning", "tail_heavy", "effective_sample_size_low")} == {"mismatch"}
