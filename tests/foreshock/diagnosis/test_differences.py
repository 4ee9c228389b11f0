"""Since when two runs are apart, and which tokens are new among the worst."""

from __future__ import annotations

import numpy as np

from foreshock.diagnosis.differences import apart_in_words, apart_since, new_worst_in_words


def curve(seed: int, fall_at: int | None = None, steps: int = 100) -> dict[int, float]:
    values = np.random.default_rng(seed).normal(0.6, 0.03, steps)
    if fall_at is not None:
        values[fall_at:] -= 0.3
    return dict(enumerate(values.tolist()))


def test_runs_are_apart_since_the_step_at_which_one_falls() -> None:
    for seed in range(20):
        assert apart_since(curve(2 * seed), curve(2 * seed + 1)) is None
        since = apart_since(curve(2 * seed), curve(2 * seed + 1, fall_at=60))
        assert since is not None
        assert abs(since - 60) <= 2


def test_repeated_run_is_apart_since_the_first_step_that_differs_at_all() -> None:
    first = curve(1)
    assert apart_since(first, first) is None
    second = first | {step: value + 1e-9 for step, value in first.items() if step >= 70}
    assert apart_since(first, second) == 70


def test_runs_that_come_together_again_or_share_few_steps_are_not_apart() -> None:
    fallen = curve(2, fall_at=40)
    assert apart_since(curve(1), fallen | {step: curve(3)[step] for step in range(70, 100)}) is None
    assert apart_since({1: 0.0, 2: 0.0}, {1: 1.0, 2: 1.0}) is None
    assert apart_since({}, {}) is None
    assert apart_in_words("Reward", None, 1) == "Reward: not apart"
    assert apart_in_words("Reward", 1, 1) == "Reward: apart since step 1, the first in common"


def test_new_worst_tokens_are_named() -> None:
    assert new_worst_in_words([1, 2], [2, 1], {}).startswith("Worst tokens: the same 2")
    assert "largest share of k3: 3 “ foo”, 4." in new_worst_in_words([1, 2], [2, 3, 4], {3: " foo"})
