"""A saw of k3 over the steps: weights that reach the engine at some steps only."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.diagnosis.sync_period import sync_period

_STEPS = list(range(37, 101))


def noisy(values: np.ndarray, seed: int) -> list[float]:
    return [float(each) for each in values * np.exp(np.random.default_rng(seed).normal(0.0, 0.2, values.size))]


@pytest.mark.parametrize("period", [3, 4, 5, 8, 10, 16, 20])
def test_a_saw_is_told_with_its_period_and_the_steps_of_the_sync(period: int) -> None:
    updates = np.array([(step - 1) % period for step in _STEPS])
    for seed in range(10):
        cause = sync_period(_STEPS, noisy(4e-4 + 1e-3 * updates**1.5, seed), 1e-3)
        assert cause is not None
        assert cause.evidence["period"] == period
        assert cause.title == f"a weight sync every {period} steps only, between which k3 grows"
        newest = max(step for step in _STEPS if (step - 1) % period == 0)
        assert f"{newest})" in cause.sentence


def test_what_is_no_saw_is_not_told() -> None:
    """Noise, a ramp, a level that wanders, every sixth step of a bad replica, a healthy saw, and too few periods."""
    steps = np.array(_STEPS)
    for seed in range(60):
        generator = np.random.default_rng(seed)
        wandering = np.exp(np.cumsum(generator.normal(0.0, 0.3, 64)))
        for values in (
            np.full(64, 3e-3),
            np.geomspace(3e-4, 3e-2, 64),
            3e-3 * wandering,
            np.where(steps % 6 == 0, 0.3, 4e-4),
            np.where(steps % 2 == 0, 0.3, 4e-4),
            4e-5 + 1e-5 * (steps % 10),
            4e-4 + 1e-3 * (steps % 40),
        ):
            assert sync_period(_STEPS, noisy(values, seed), 1e-3) is None
