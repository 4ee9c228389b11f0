"""A fall of the reward that is one of cut responses or of all, and a reward that pays for being cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, PastAlert, SteppedValues
from foreshock.diagnosis.reward import COLLAPSE_RULE

_STEPS = range(67, 131)


def fallen(others: float, cut: float = 0.87) -> History:
    """Return a run whose reward fell from 0.58 to 0.14 from step 76 on, with the reward of what was not cut."""
    since = [step >= 76 for step in _STEPS]
    fall = PastAlert(
        COLLAPSE_RULE, "critical", 82, True, "The reward fell from 0.58 to 0.14.", "Stop.",
        evidence={"onset_step": 76, "before": 0.58, "now": 0.14, "first": "no rise", "cause": "reward"},
    )  # fmt: skip
    return History(
        alerts=(fall,),
        observed_step=130,
        newest_step=130,
        k3=SteppedValues(_STEPS, [6e-5] * 64),
        tokens=[5000] * 64,
        reward=SteppedValues(_STEPS, [0.14 if each else 0.58 for each in since]),
        truncated=SteppedValues(_STEPS, [cut if each else 0.04 for each in since]),
        finished_reward=SteppedValues(_STEPS, [others if each else 0.6 for each in since]),
        model_kind="dense",
    )


def test_a_fall_of_cut_responses_names_the_length_cap() -> None:
    found = diagnose(fallen(0.61))
    assert "; 87 % of the responses are cut, the others get 0.61" in found.headline
    assert found.next_steps[0].startswith("Stop, or go back to a checkpoint from before step 76")
    assert "Else raise the length cap" in found.next_steps[0]
    (cause,) = (each for each in found.causes if each.name == "responses_cut")
    assert cause.sentence.startswith("87 % of the responses are cut at the length cap, 4 % before step 76. The others")


@pytest.mark.parametrize(
    "history", [fallen(0.2), fallen(0.61, cut=0.1), replace(fallen(0.61), finished_reward=SteppedValues())]
)
def test_a_fall_of_all_responses_is_no_matter_of_the_cap(history: History) -> None:
    found = diagnose(history)
    assert "responses_cut" not in [each.name for each in found.causes]
    assert "look at the learning rate and the data" in found.next_steps[0]


def paid(of_cut: float, others: float, noise: float = 0.05) -> History:
    """Return a run whose share of cut responses grows from 40 to 98 %, with the mean rewards of both kinds."""
    generator = np.random.default_rng(5)
    cut = np.linspace(0.4, 0.98, 64)
    finished = others + generator.normal(0.0, noise, 64)
    reward = cut * (of_cut + generator.normal(0.0, noise, 64)) + (1.0 - cut) * finished
    return replace(
        fallen(0.2), alerts=(), reward=SteppedValues(_STEPS, reward.tolist()),
        truncated=SteppedValues(_STEPS, cut.tolist()), finished_reward=SteppedValues(_STEPS, finished.tolist()),
    )  # fmt: skip


def test_a_reward_that_pays_for_being_cut_asks_for_no_longer_cap() -> None:
    found = diagnose(paid(1.2, 0.8))
    assert "cut responses get more reward (1.2) than the others (0." in found.headline
    assert found.next_steps[0].startswith("Read some of the cut responses and look at the reward function")
    assert not any("Raise the l" in each for each in found.next_steps)


@pytest.mark.parametrize("history", [paid(0.3, 0.8), paid(0.8, 0.8), paid(0.82, 0.8)])
def test_cut_responses_with_no_more_reward_are_not_told_so(history: History) -> None:
    assert "cut_rewarded" not in [each.name for each in diagnose(history).causes]
