"""Alerts of one cause are one episode; a collapse of the reward has what begins with it."""

from __future__ import annotations

from foreshock.diagnosis.episodes import episodes_of, is_told, onset_of
from foreshock.diagnosis.history import PastAlert
from foreshock.severity import Severity


def alert(rule: str, cause: str, step: int, severity: Severity = "warning") -> PastAlert:
    return PastAlert(rule, severity, step, True, f"{rule}.", evidence={"cause": cause})


RISE = alert("mismatch_rise", "mismatch", 110)
CRITICAL = alert("mismatch_critical", "mismatch", 140, "critical")
GRADIENT = alert("gradient_rise", "gradient", 120)
RATIO = alert("mean_ratio_off", "sampling", 150)
FALL = alert("reward_fall", "reward", 215)
COLLAPSE = alert("reward_collapse", "reward", 225, "critical")
LENGTH = alert("length_fall", "length", 240)
DATA = alert("log_probs_not_finite", "data", 230)
ALL = (RISE, CRITICAL, GRADIENT, RATIO, FALL, COLLAPSE, LENGTH, DATA)


def rules(alerts: tuple[PastAlert, ...]) -> list[list[str]]:
    return [[each.rule for each in episode] for episode in episodes_of(alerts)]


def test_a_collapse_by_mismatch_is_two_episodes_with_the_collapse_first() -> None:
    assert rules(ALL[:-1]) == [
        ["reward_collapse", "reward_fall", "length_fall"],
        ["mismatch_critical", "mismatch_rise", "gradient_rise", "mean_ratio_off"],
    ]
    # A fault of the data is told by itself.
    assert rules(ALL)[2:] == [["log_probs_not_finite"]]


def test_what_rises_after_the_collapse_belongs_to_it() -> None:
    later = alert("mismatch_rise", "mismatch", 230)
    assert rules((COLLAPSE, later)) == [["reward_collapse", "mismatch_rise"]]
    # A fall that is no collapse explains nothing.
    assert len(rules((FALL, later))) == 2


def test_a_person_hears_at_most_four_messages_of_a_collapse() -> None:
    told: list[PastAlert] = []
    for each in sorted(ALL[:-1], key=lambda each: each.step):
        if not is_told(each, told):
            told.append(each)
    assert [each.rule for each in told] == ["mismatch_rise", "mismatch_critical", "reward_collapse"]
    assert not is_told(DATA, told)
    assert not is_told(FALL, [RISE])
    assert is_told(alert("mismatch_runaway", "mismatch", 230, "critical"), [COLLAPSE])


def test_a_policy_that_changed_before_the_mismatch_is_a_story_of_its_own() -> None:
    early, late = alert("perplexity_rise", "policy", 46), alert("perplexity_rise", "policy", 150)
    assert rules((RISE, CRITICAL, late)) == [["mismatch_critical", "mismatch_rise", "perplexity_rise"]]
    assert rules((RISE, CRITICAL, early)) == [["mismatch_critical", "mismatch_rise"], ["perplexity_rise"]]
    assert is_told(late, [RISE])
    # After a collapse what was first stands beside it, and what followed belongs to it.
    assert rules((early, alert("mismatch_rise", "mismatch", 230), COLLAPSE)) == [
        ["reward_collapse", "mismatch_rise"],
        ["perplexity_rise"],
    ]


def test_an_episode_is_dated_by_alerts_of_the_cause_of_its_head() -> None:
    lag = alert("lag_high", "staleness", 10)
    assert onset_of(CRITICAL, (CRITICAL, RISE, lag)) == RISE.step
    assert onset_of(CRITICAL, (CRITICAL, alert("mismatch_above_noise_floor", "mismatch", 20, "info"))) == CRITICAL.step
