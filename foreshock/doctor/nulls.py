"""The nulls of the doctor's tests: what variants explain of healthy logs, and how many rollouts improve by chance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.evidence import Float64
from foreshock.doctor.floors import Floors
from foreshock.doctor.replays import Replays
from foreshock.doctor.trials import View

__all__ = ["chance_of", "healthy_share"]


def healthy_share(
    replays: Replays, floors: Floors, variants: tuple[Variant, ...], view: View, *, in_part: bool
) -> tuple[float, float]:
    """Return the largest share, without and with weights, that variants explain of logs without a fault; 0 if none.

    The logs are replays of the announced weights in other precisions. All is done as for the logged ones: fits are
    made anew, and with `in_part` rollouts may be left out. No replay is made that the variants did not need before.
    """
    base = view.restricted(floors.base)
    own = replays.log_probs(base.change, base.sampling, view)
    weights = np.stack([np.ones(own.size), floors.weights[view.tokens] if view.rows else floors.weights])
    found = np.zeros(2)
    for log_probs in floors.healthy:
        logged = replace(view.compared, logged=log_probs[view.tokens] if view.rows else log_probs)
        start = replace(base, halves=logged.halves(own))
        before = np.maximum(weights @ start.halves, 1e-300)
        for each in replays.try_on(start, variants, replace(view, compared=logged), is_silent=True):
            if in_part or each.rows.all():
                found = np.maximum(found, 1 - weights @ each.halves / before)
    return float(found[0]), float(found[1])


def chance_of(improvements: Float64) -> float:
    """Return how likely so many rollouts improve so much by chance, from the improvement of each [N] (signed ranks)."""
    values = improvements[np.isfinite(improvements) & (improvements != 0)]
    if not values.size:
        return 1.0
    ranks = np.abs(values).argsort().argsort() + 1.0
    number = values.size
    mean = number * (number + 1) / 4
    spread = math.sqrt(number * (number + 1) * (2 * number + 1) / 24)
    return 0.5 * math.erfc((float(ranks[values > 0].sum()) - mean) / spread / math.sqrt(2))
