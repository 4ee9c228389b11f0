"""The diagnosis in at most 80 characters: the reward first, and never more than fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, SteppedValues
from foreshock.diagnosis.short_headline import MOST_CHARACTERS
from tests.foreshock.diagnosis.test_diagnose import COLLAPSE, FLAT, HEALTHY, RISE, SHIFT

FELL = replace(
    COLLAPSE,
    evidence={"onset_step": 25, "before": 0.85, "now": 0.03, "first": "mismatch", "k3_baseline": 2e-5,
              "k3_after": 5e-3, "k3_onset_step": 12},
)  # fmt: skip
MISMATCH = replace(RISE, evidence={"cause": "mismatch", "onset_step": 17})
ABOVE = replace(HEALTHY, k3=SteppedValues(HEALTHY.k3.steps, [2e-2] * 40))
LONG = replace(SHIFT, title="the two log-probs are shifted by one token in a part of the rollouts of these steps")


@pytest.mark.parametrize(
    ("history", "short"),
    [
        (HEALTHY, "Healthy: k3 2.0e-5, reward 0.90."),
        (replace(HEALTHY, causes=(FLAT,)), "Healthy: k3 2.0e-5, reward 0.90; but no group has a spread."),
        (
            replace(HEALTHY, alerts=(FELL, RISE)),
            "Collapsed: reward 0.85 → 0.03 since step 25; k3 had grown × 250 since 12.",
        ),
        (
            replace(ABOVE, alerts=(MISMATCH,), causes=(SHIFT,)),
            "Mismatch: k3 2.0e-2, healthy to 1.0e-3, since step 17.",
        ),
        (
            replace(ABOVE, alerts=(MISMATCH,), causes=(LONG,)),
            "Mismatch: k3 2.0e-2, healthy to 1.0e-3, since step 17.",
        ),
        (History(), "Unknown: no step is complete yet."),
    ],
)
def test_the_news_come_first_and_fit(history: History, short: str) -> None:
    found = diagnose(history).short
    assert len(found) <= MOST_CHARACTERS
    assert found == short


@pytest.mark.parametrize(("newest", "told"), [(0.01, "0.01"), (0.09, "0.09"), (0.5, "0.03")])
def test_the_row_and_the_headline_tell_one_reward(newest: float, told: str) -> None:
    reward = replace(HEALTHY.reward, values=[*HEALTHY.reward.values[:-5], *[newest] * 5])
    found = diagnose(replace(HEALTHY, reward=reward, alerts=(FELL,)))
    assert f"0.85 → {told} since" in found.short
    assert f"from 0.85 to {told}" in found.headline


def test_a_headline_without_numbers_is_cut_at_a_word() -> None:
    other = replace(RISE, rule="lag_high", why="The sampled tokens come from weights that are many versions old " * 3)
    found = diagnose(replace(HEALTHY, alerts=(other,))).short
    assert len(found) <= MOST_CHARACTERS
    assert found.endswith("…")
    assert diagnose(replace(HEALTHY, alerts=(other,))).headline.startswith(found[:-1])


def test_a_long_first_clause_is_cut_at_a_part_and_loses_its_parentheses() -> None:
    cut = replace(SHIFT, title="μ was truncated and π was not (processed log-probs)", evidence={"first_step": 1})
    found = diagnose(replace(HEALTHY, causes=(cut,)))
    assert "(processed log-probs), so that k3 is not the mismatch" in found.headline
    assert found.short == "Warning since step 1: μ was truncated and π was not."
