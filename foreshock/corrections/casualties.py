"""Who would be lost: the sequences that a correction touches, against the others."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.exact_sums import mean
from foreshock.corrections.results import Casualties, Population
from foreshock.measures.summaries import RolloutSummaries

__all__ = ["casualties_of"]

_Booleans = NDArray[np.bool_]


def casualties_of(summaries: RolloutSummaries, touched: _Booleans, measured: _Booleans) -> Casualties:
    """The sequences with `touched` [N] against the rest, of those with `measured` [N]."""
    groups = _groups(summaries, touched, measured)
    return Casualties(_population(summaries, touched & measured), _population(summaries, ~touched & measured), *groups)


def _population(summaries: RolloutSummaries, chosen: _Booleans) -> Population:
    return Population(
        int(chosen.sum()),
        *(_mean_of(summaries, name, chosen) for name in ("reward", "advantage", "length", "turns", "lag")),
    )


def _mean_of(summaries: RolloutSummaries, name: str, chosen: _Booleans) -> float:
    values = summaries.column(name).astype(np.float64)[chosen]
    return mean(values[np.isfinite(values)])


def _groups(summaries: RolloutSummaries, touched: _Booleans, measured: _Booleans) -> tuple[int, float, float]:
    """Groups of two or more, the share that a sequence is touched of, the share that all are."""
    clusters = summaries.clusters()
    sizes = np.bincount(clusters[measured], minlength=1)
    hit = np.bincount(clusters[measured & touched], minlength=sizes.size)
    real = sizes >= 2
    groups = int(real.sum())
    if not groups:
        return 0, math.nan, math.nan
    return groups, float((hit[real] > 0).sum() / groups), float((hit[real] == sizes[real]).sum() / groups)
