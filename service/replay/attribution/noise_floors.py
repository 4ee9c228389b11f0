"""Noise floors of scorers, and the k3 of a comparison above the noise of its two scorers.

A scorer run twice has k3 = σ²; in a comparison with another scorer its noise adds σ²/2. Each end's floor is therefore
halved before it is subtracted. The result is never clamped: a negative one means that the noise is the larger part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from foreshock.comparisons import split_comparison
from foreshock.scorers import noise_floor_scorers


@dataclass(frozen=True, slots=True)
class Floor:
    """The noise floor of a scorer: its rebatched variant compared with itself, in nats per token."""

    scorer: str
    comparison: str
    k3_kl: float
    mean_abs_d: float
    max_abs_d: float
    rollouts: int
    tokens: int


def excess_over_floors(comparison: str, k3_kl: float, floors: Mapping[str, float]) -> float | None:
    """Return k3 − ½·floor(target) − ½·floor(behaviour) in nats; None if a floor is unknown or k3 is not finite.

    `floors` maps a scorer to the k3 of its noise floor.
    """
    known = [_floor_of(name, floors) for name in split_comparison(comparison)]
    if not math.isfinite(k3_kl) or any(floor is None or not math.isfinite(floor) for floor in known):
        return None
    return k3_kl - 0.5 * sum(floor for floor in known if floor is not None)


def _floor_of(scorer: str, floors: Mapping[str, float]) -> float | None:
    return next((floors[name] for name in noise_floor_scorers(scorer) if name in floors), None)
