"""A scorer in two environments: what the environment changes, and what it does not, on data with known truth."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures.estimators.attribution import environment_link, excess_over_environments

TOKENS = 25
Float64 = NDArray[np.float64]


def cut(prompts: int, per_prompt: int = 4) -> tuple[NDArray[np.int64], list[str]]:
    """The offsets of the rollouts and their prompts."""
    rollouts = prompts * per_prompt
    return np.arange(0, rollouts * TOKENS + 1, TOKENS), [f"p{row // per_prompt}" for row in range(rollouts)]


def made(prompts: int, systematic: float, noise: tuple[float, float, float], seed: int = 0) -> list[Float64]:
    """A logged score and two replays: a common part, a difference of both replays, and noise of each environment."""
    generator = np.random.default_rng(seed)
    size = prompts * 4 * TOKENS
    common = -generator.exponential(1.0, size) - 2.0
    shift = systematic * generator.standard_normal(size)
    e0, e1, e2 = (scale * generator.standard_normal(size) for scale in noise)
    return [common + e0, common + shift + e1, common + shift + e2]


def test_link_has_the_moments_of_the_difference() -> None:
    logged, first, second = made(8, 0.0, (0.0, 0.01, 0.02))
    offsets, groups = cut(8)
    found = environment_link(first, second, None, offsets, None, groups)
    d = second - first
    assert found.k3_kl == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-9)
    assert found.max_abs_d == np.abs(d).max()
    assert found.tokens == logged.size
    assert np.isnan(found.share)


def test_share_is_that_of_the_whole_chain() -> None:
    logged, first, second = made(16, 0.0, (0.0, 0.0, 0.1))
    offsets, groups = cut(16)
    trainer = second + 0.1 * np.random.default_rng(1).standard_normal(logged.size)
    found = environment_link(first, second, (trainer, logged), offsets, None, groups)
    assert found.share_low < 0.5 < found.share_high
    assert found.share == pytest.approx(0.5, abs=0.05)


def test_tokens_without_one_of_the_scores_are_excluded() -> None:
    logged, first, second = made(8, 0.0, (0.0, 0.01, 0.02))
    offsets, groups = cut(8)
    second[:TOKENS] = np.nan
    mask = np.ones(logged.size, np.uint8)
    mask[TOKENS : 2 * TOKENS] = 0
    found = environment_link(first, second, None, offsets, mask, groups)
    assert found.tokens == logged.size - 2 * TOKENS
    assert environment_link(first, first * np.nan, None, offsets).tokens == 0


def test_excess_is_the_formula() -> None:
    logged, first, second = made(8, 0.02, (0.01, 0.01, 0.01))
    offsets, groups = cut(8)
    value, low, high = excess_over_environments(logged, first, second, offsets, None, groups)
    expected = 0.5 * (np.mean((first - logged) * (second - logged)) - 0.5 * np.mean(np.square(first - second)))
    assert value == pytest.approx(expected, rel=1e-9)
    assert low < value < high


@pytest.mark.parametrize("systematic", [0.0, 0.02])
def test_interval_of_the_excess_covers_what_is_no_environments(systematic: float) -> None:
    offsets, groups = cut(24)
    covered = 0
    for seed in range(100):
        logged, first, second = made(24, systematic, (0.03, 0.03, 0.03), seed)
        _, low, high = excess_over_environments(logged, first, second, offsets, None, groups)
        covered += low <= 0.5 * systematic**2 <= high
    assert covered >= 88


def test_excess_is_wrong_if_the_environments_are_not_exchangeable() -> None:
    """The assumption matters: a run's environment that is noisier than the two replays' looks like an excess."""
    offsets, groups = cut(64)
    logged, first, second = made(64, 0.0, (0.05, 0.01, 0.01))
    value, low, _ = excess_over_environments(logged, first, second, offsets, None, groups)
    assert low > 0
    assert value == pytest.approx(0.5 * (0.05**2 - 0.01**2), rel=0.1)
