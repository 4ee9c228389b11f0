"""What is left of a comparison's k3 above the noise of its two scorers.

A scorer run twice has k3 = σ²; in a comparison with another scorer its noise adds σ²/2. So each end's floor is halved
before it is subtracted, and the result is never clamped: below zero it says that the floor is not the smaller part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreshock.scorers import noise_floor_scorers


def excess_over_floors(comparison: str, k3_kl: float, floors: Mapping[str, float]) -> float | None:
    """k3 − ½·floor(target) − ½·floor(behaviour), in nats; None where a floor is not known or k3 is not finite.

    `floors` maps a scorer to the k3 of itself against itself with other batches.
    """
    target, _, behaviour = comparison.partition("/")
    known = [_floor_of(name, floors) for name in (target, behaviour)]
    if not math.isfinite(k3_kl) or any(floor is None or not math.isfinite(floor) for floor in known):
        return None
    return k3_kl - 0.5 * sum(floor for floor in known if floor is not None)


def _floor_of(scorer: str, floors: Mapping[str, float]) -> float | None:
    for name in noise_floor_scorers(scorer):
        if name in floors:
            return floors[name]
    return None
