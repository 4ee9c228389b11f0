"""Rewards of evaluations: which scalars they are, and a fall of them that lasts."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.evaluations import fall_of_evaluation, is_evaluation, stays_at_zero
from foreshock.diagnosis.history import History, SteppedValues

NAME = "val/test_score/deepcoder"


@pytest.mark.parametrize(
    "name",
    [
        "val/test_score/deepcoder", "val-core/openai/gsm8k/reward/mean@1", "val-core/math/minerva/acc/maj@8/mean",
        "eval_reward", "eval/reward", "eval_rewards/accuracy/mean", "validation/accuracy", "eval/all/pass_at_4",
        "eval/aime24/avg@32", "eval-rollout/task_reward/avg", "eval_openai/gsm8k_pass1", "test/success_rate",
    ],
)  # fmt: skip
def test_rewards_of_evaluations_are_known_by_their_names(name: str) -> None:
    assert is_evaluation(name)


@pytest.mark.parametrize(
    "name",
    [
        "reward", "critic/rewards/mean", "value/reward", "val-core/math/reward/std@8", "eval_reward_std", "eval_loss",
        "val/response_length/mean", "eval/kl", "testing", "val-aux/math/reward/worst@4/mean", "eval_runtime",
        "eval_frac_reward_zero_std",
    ],
)  # fmt: skip
def test_other_scalars_are_none(name: str) -> None:
    assert not is_evaluation(name)


def evaluations(levels: np.ndarray, seed: int = 0, noise: float = 0.01) -> SteppedValues:
    """Return an evaluation each 10 steps."""
    values = levels + np.random.default_rng(seed).normal(0, noise, levels.size)
    return SteppedValues(range(10, 10 * levels.size + 1, 10), values.tolist())


HACKED = np.r_[np.linspace(0.28, 0.34, 12), np.full(8, 0.17)]


def test_a_lasting_fall_is_dated_and_named_in_a_healthy_headline() -> None:
    steps = list(range(1, 201))
    history = History(
        observed_step=200, k3=SteppedValues(steps[-64:], [2e-5] * 64), tokens=[5000] * 64,
        reward=SteppedValues(steps[-64:], np.linspace(0.4, 0.8, 64).tolist()),
        evaluations={NAME: evaluations(HACKED), "val/test_score/other": evaluations(np.full(20, 0.5))},
    )  # fmt: skip
    found = diagnose(history)
    (cause,) = found.causes
    assert cause.name == "evaluation_fall"
    assert cause.evidence["first_step"] == 130
    assert cause.sentence.endswith("; 1 of 2 evaluation rewards fell.")
    assert found.verdict == "healthy"
    assert f"; but {NAME} fell from 0.33 to 0.17 since step 130" in found.headline
    assert "a checkpoint from before step 130" in found.next_steps[0]


@pytest.mark.parametrize(
    "levels",
    [
        np.linspace(0.2, 0.5, 20),
        np.full(20, 0.4),
        np.r_[np.full(8, 0.4), np.full(4, 0.15), np.full(8, 0.4)],
        np.r_[np.full(10, 0.4), 0.1],
    ],
    ids=["rises", "level", "recovered", "one value"],
)
def test_what_does_not_fall_for_good_is_no_fall(levels: np.ndarray) -> None:
    found = [seed for seed in range(20) if fall_of_evaluation({NAME: evaluations(levels, seed, 0.02)})]
    assert found == []


@pytest.mark.parametrize(
    ("values", "before", "now", "is_told"),
    [
        ([0.02] * 10, 0.3, 0.68, True),
        ([0.02] * 4, 0.3, 0.68, False),
        ([0.02] * 9 + [0.2], 0.3, 0.68, False),
        ([0.02] * 10, 0.3, 0.4, False),
        ([0.02] * 10, 30.0, 68.0, False),
    ],
)
def test_an_evaluation_that_stays_near_0_while_the_reward_rises(
    values: list[float], before: float, now: float, is_told: bool
) -> None:
    reward = SteppedValues(list(range(60)), np.linspace(before, now, 60).tolist())
    stays = stays_at_zero({"val/acc": SteppedValues(list(range(len(values))), values)}, reward)
    assert bool(stays) == is_told
    if is_told:
        assert stays[0].title == "val/acc stays at 0.02"
        assert "while the reward rose from 0.36 to 0.62" in stays[0].sentence
