"""Rewards that all become the highest one at once, and those of a task that is learned."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.diagnosis.history import SteppedValues
from foreshock.diagnosis.reward_ceiling import ceiling_of
from foreshock.diagnosis.wording import reward_number


def told(values: np.ndarray) -> list[str]:
    return [each.title for each in ceiling_of(SteppedValues(range(1, values.size + 1), values.tolist()))]


@pytest.mark.parametrize("top", [1.0, 5.0, 0.0])
def test_a_reward_that_is_the_highest_in_every_step_since_one_is_told_with_its_step(top: float) -> None:
    before = top - np.random.default_rng(3).uniform(0.4, 0.6, 30)
    was = reward_number(float(np.median(before[-5:])))
    assert told(np.concatenate([before, np.full(8, top)])) == [
        f"every reward is {reward_number(top)} since step 31, {was} on average before"
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_task_that_is_solved_and_a_constant_reward_are_not_told(seed: int) -> None:
    generator = np.random.default_rng(seed)
    learned = generator.binomial(64, 1.0 / (1.0 + np.exp(-np.arange(-40, 60) / 5.0))) / 64
    jump = np.concatenate([generator.uniform(0.4, 0.6, 30), np.ones(4)])
    for values in (learned, jump, np.ones(40), np.concatenate([generator.uniform(0.4, 0.6, 30), np.zeros(8)])):
        assert not told(values)
