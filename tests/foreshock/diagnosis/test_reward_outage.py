"""Steps without any reward between steps that are rewarded as before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import SteppedValues
from foreshock.diagnosis.reward_outage import outage_of
from tests.foreshock.diagnosis.test_diagnose import HEALTHY, STEPS


def rewards(zero: range | list[int], level: float = 0.5, noise: float = 0.05, count: int = 40) -> SteppedValues:
    values = level + noise * np.random.default_rng(0).normal(size=count)
    values[list(zero)] = 0.0
    return SteppedValues(list(range(count)), values.tolist())


def test_an_outage_is_dated_and_named_beside_a_healthy_mismatch() -> None:
    found = diagnose(replace(HEALTHY, reward=rewards(range(20, 27))))
    assert "but the reward was 0 in steps 20 to 26, and as before since" in found.headline
    assert "is near its best" not in found.headline
    assert "Leave such rollouts out" in found.next_steps[0]
    (two,) = outage_of(rewards([10, 20, 21]))
    assert two.title == "the reward was 0 at step 10 and in steps 20 to 21, and as before since"
    assert len(STEPS) == 40


@pytest.mark.parametrize(
    "reward",
    [
        rewards(range(20, 40)),  # a collapse
        rewards(range(38, 40)),  # not known yet
        rewards(range(5)),  # a start without a reward
        rewards([]),
        rewards([4, 11, 19, 30]),  # rewards that are 0 now and then
        rewards(range(10, 13), level=0.02, noise=0.02),  # rare rewards
        rewards(range(5, 10), count=15),
        rewards([31], level=0.2, noise=0.06),  # so few rollouts are rewarded that none is so by chance
        SteppedValues(),
    ],
)
def test_what_is_no_outage(reward: SteppedValues) -> None:
    assert outage_of(reward) == ()
