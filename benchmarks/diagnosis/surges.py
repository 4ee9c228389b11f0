"""Surges and ramps of the lengths: what moves the learning rate.

Bars: none of 600 slow ramps (×2 to ×4 in 80 to 300 steps from step 0 to 150, in lengths or in log lengths, noise 0.05
to 0.25, flat and rising reward) moves it; 60 of 60 surges (×3 in 10 to 30 steps) do; at most 1 % of the autocorrelated
healthy curves (φ 0.8 to 0.95, standard deviation 0.25) do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.detector.curves import noise_of
from benchmarks.diagnosis.family import Family
from foreshock.diagnosis.surge import advance_surge
from foreshock.diagnosis.surge_state import StepLengths, SurgeSettings, SurgeState

RAMPS = 600
SURGES = 60
HEALTHY = 450
HEALTHY_STEPS = 400
LARGEST_HEALTHY_SHARE = 0.01
SEED = 2026

Values = NDArray[np.float64]


def measure() -> Family:
    """Measure ramps, surges and healthy curves."""
    ramps = sum(moves(*ramp(number)) for number in range(RAMPS))
    surges = sum(_surge_moves(number) for number in range(SURGES))
    healthy = sum(_healthy_moves(number) for number in range(HEALTHY))
    reached = ramps == 0 and surges == SURGES and healthy <= LARGEST_HEALTHY_SHARE * HEALTHY
    return Family(
        reached,
        [
            f"surges_ramps_moved={ramps}/{RAMPS}",
            f"surges_found={surges}/{SURGES}",
            f"surges_healthy_moved={healthy}/{HEALTHY}",
        ],
    )


def moves(lengths: Values, rewards: Values | None = None, settings: SurgeSettings | None = None) -> bool:
    """Return whether lengths alone move the learning rate."""
    state, settings = SurgeState(), settings or SurgeSettings()
    for place, length in enumerate(lengths):
        reward = None if rewards is None else float(rewards[place])
        state, _ = advance_surge(state, place + 1, StepLengths(float(length), reward=reward), False, settings)
    return state.effective_surge_step is not None


def ramp(number: int, seed: int = SEED) -> tuple[Values, Values]:
    """Return the lengths and rewards of a slow ramp."""
    random = np.random.default_rng([seed, 1, number])
    growth, steps, start = random.uniform(2.0, 4.0), int(random.integers(80, 301)), int(random.integers(0, 151))
    done = np.clip((np.arange(start + steps + 100) - start) / steps, 0.0, 1.0)
    lengths = 1000.0 * (1.0 + (growth - 1.0) * done if number % 2 else growth**done)
    rewards = 0.4 + (0.3 * done if number % 4 < 2 else 0.0) + 0.05 * random.normal(size=len(done))
    return lengths * np.exp(random.uniform(0.05, 0.25) * random.normal(size=len(done))), rewards


def _surge_moves(number: int) -> bool:
    random = np.random.default_rng([SEED, 2, number])
    steps, start = int(random.integers(10, 31)), int(random.integers(40, 151))
    done = np.clip((np.arange(start + steps + 60) - start) / steps, 0.0, 1.0)
    return moves(1000.0 * 3.0**done * np.exp(random.uniform(0.05, 0.25) * random.normal(size=len(done))))


def _healthy_moves(number: int) -> bool:
    random = np.random.default_rng([SEED, 3, number])
    return moves(1000.0 * np.exp(noise_of(0.25, (0.8, 0.9, 0.95)[number % 3], HEALTHY_STEPS, random)))
