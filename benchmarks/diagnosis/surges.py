"""Surges and ramps of the lengths: which of them move the learning rate.

Bars: none of 600 slow ramps (×2 to ×4 in 80 to 300 steps from step 0 to 150, in lengths or in log lengths, noise 0.05
to 0.25, flat and rising reward) moves it; 60 of 60 surges (×3 in 10 to 30 steps) do; at most 1 % of the autocorrelated
healthy curves (φ 0.8 to 0.95, standard deviation 0.25) and of the held-out healthy curves of five kinds do. For each
published surge at each of three noise levels, the decay period is within −35 % and +3 % of 1.8 × the stated step for at
least 95 of 100 seeds if lengths alone distinguish the rise from a ramp, and for 90 if the rise is slower and k3 rises
with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Line
from benchmarks.diagnosis.curves import (
    PUBLISHED_NOISE,
    PUBLISHED_SEEDS,
    PUBLISHED_SURGES,
    healthy_curves,
    noise_of,
    published_curve,
    watch,
)
from foreshock.diagnosis.surge import advance_surge
from foreshock.diagnosis.surge_state import StepLengths, SurgeSettings, SurgeState
from foreshock.learning_rate.length_decay import DECAY_MULTIPLIER, ScheduleSettings

RAMPS = 600
SURGES = 60
HEALTHY = 450
HEALTHY_STEPS = 400
LARGEST_HEALTHY_SHARE = 0.01
LEAST_PUBLISHED, LEAST_SLOW = 95, 90
EARLIEST, LATEST = 0.65, 1.03
SEED = 2026

Values = NDArray[np.float64]


def measure() -> list[Line]:
    """Measure ramps, surges and healthy curves."""
    kinds = [watch(steps)[0].surge_step is not None for _, steps in healthy_curves()]
    healthy = sum(_healthy_moves(number) for number in range(HEALTHY))
    published, slow = published_worst(slow=False), published_worst(slow=True)
    of_seeds = f"of {PUBLISHED_SEEDS} seeds, periods that are right"
    return [
        Line("surges_ramps_moved", f"of {RAMPS} ramps, moved", sum(moves(*ramp(each)) for each in range(RAMPS)), 0),
        Line(
            "surges_found", f"of {SURGES} surges, found", sum(map(_surge_moves, range(SURGES))), SURGES, at_least=True
        ),
        Line("surges_healthy_moved", f"of {HEALTHY} healthy, moved", healthy, LARGEST_HEALTHY_SHARE * HEALTHY),
        Line(
            "surges_held_out_moved", f"of {len(kinds)} held out, moved", sum(kinds), LARGEST_HEALTHY_SHARE * len(kinds)
        ),
        Line("surges_published_worst", f"{of_seeds}, published", published, LEAST_PUBLISHED, at_least=True),
        Line("surges_slow_worst", f"{of_seeds}, slow", slow, LEAST_SLOW, at_least=True),
    ]  # fmt: skip


def published_worst(slow: bool) -> int:
    """Return the number of seeds with a right decay period, for the published surge and noise with the fewest."""
    return min(
        sum(_period_is_right(surge, *noise, seed, slow) for seed in range(PUBLISHED_SEEDS))
        for surge in PUBLISHED_SURGES.values()
        for noise in PUBLISHED_NOISE
    )


def _period_is_right(surge: int, deviation: float, autocorrelation: float, seed: int, slow: bool) -> bool:
    state, _, _ = watch(published_curve(surge, deviation, autocorrelation, seed, slow))
    wanted = DECAY_MULTIPLIER * surge
    return (
        state.surge_step is not None
        and EARLIEST * wanted <= ScheduleSettings().period(state.surge_step) <= LATEST * wanted
    )


def moves(lengths: Values, rewards: Values | None = None) -> bool:
    """Return whether lengths alone move the learning rate."""
    state, settings = SurgeState(), SurgeSettings()
    for place, length in enumerate(lengths):
        reward = None if rewards is None else float(rewards[place])
        state, _ = advance_surge(state, place + 1, StepLengths(float(length), reward=reward), False, settings)
    return state.effective_surge_step is not None


def ramp(number: int) -> tuple[Values, Values]:
    """Return the lengths and rewards of a slow ramp."""
    random = np.random.default_rng([SEED, 1, number])
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
