"""The nulls of the doctor's tests, each measured on the data at hand; no threshold for a name is a constant.

`healthy_share`: what variants explain of logs without a fault. `expected_by_chance`: how many other causes would
explain as much. `chosen_by_chance`: what the choice of the better of several replays for each rollout explains.
`evidence.chance_of`: how likely so many rollouts improve. `Floors.precision_shares`: what precisions explain of one
another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreshock.doctor.catalogue import Variant
from foreshock.doctor.evidence import Float64
from foreshock.doctor.floors import Floors
from foreshock.doctor.replays import Replays
from foreshock.doctor.trials import View

_DRAWS = 200


def healthy_share(
    replays: Replays, floors: Floors, variants: tuple[Variant, ...], view: View, *, in_part: bool
) -> tuple[float, float]:
    """Return the largest share, without and with weights, that variants explain of logs without a fault; 0 if none.

    The logs are replays of the announced weights in other precisions. They are treated as the logged values: fits are
    repeated, and with `in_part` rollouts may be left out. The variants need no replay that they did not need before.
    """
    base = view.restricted(floors.base)
    own = replays.log_probs(base.change, base.sampling, view)
    weights = np.stack([np.ones(own.size), floors.weights[view.tokens] if view.rows else floors.weights])
    found = np.zeros(2)
    for log_probs in floors.healthy:
        logged = view.compared.having(log_probs[view.tokens] if view.rows else log_probs)
        start = replace(base, halves=logged.halves(own))
        before = np.maximum(weights @ start.halves, 1e-300)
        for each in replays.try_on(start, variants, replace(view, compared=logged), is_silent=True):
            if in_part or each.rows.all():
                found = np.maximum(found, 1 - weights @ each.halves / before)
    return float(found[0]), float(found[1])


def gain_of(share: float) -> float:
    """Return log(before / after) of a share that is explained; 0 if nothing is."""
    return -math.log(max(1 - share, 1e-12)) if share > 0 else 0.0


def expected_by_chance(gain: float, others: Sequence[float]) -> float:
    """Return the expected number of causes that would explain so much if none were true.

    The gains are those of `gain_of`; those of wrong causes are taken as exponentially distributed. Their scale comes
    from the median of the positive `others`, so that a relative of the true cause counts as only one. The error of the
    scale widens the tail, as if it were the mean of two thirds as many. Infinite if no other cause explains anything.
    """
    helpful = [each for each in others if each > 0]
    if not helpful:
        return math.inf
    scale, known = float(np.median(helpful)) / math.log(2), len(helpful) / 1.5
    return (len(helpful) + 1) * float((1 + gain / scale / known) ** -known)


def chosen_by_chance(halves: Float64, rows: NDArray[np.int64], choices: int, quantile: float) -> float:
    """Return a quantile of the share that is explained if each rollout takes the best of `choices` rollouts' values.

    `halves` [T] is what is left at tokens of the rollouts `rows` [T]. Permuted by rollout, it stands for what another,
    equally good replay leaves.
    """
    values = np.bincount(rows, halves)
    if not values.sum() > 0:
        return 0.0
    random = np.random.default_rng(27)
    others = random.permuted(np.broadcast_to(values, (_DRAWS, choices - 1, values.size)), axis=2)
    left = np.minimum(values, others.min(axis=1)).sum(axis=1)
    return float(np.quantile(1 - left / values.sum(), quantile))
