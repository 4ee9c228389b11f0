"""Who would be lost: the sequences that a correction touches, against the others."""

from __future__ import annotations

import math

import numpy as np

from foreshock.corrections.results import Casualties
from foreshock.corrections.sequences import Booleans, Sequences

__all__ = ["casualties_of"]


def casualties_of(sequences: Sequences, touched: Booleans) -> Casualties:
    """The sequences with `touched` [M] against the rest."""
    real = sequences.group_sizes >= 2
    groups = int(real.sum())
    shares = (math.nan, math.nan)
    if groups:
        hit = np.bincount(sequences.clusters[touched], minlength=sequences.group_sizes.size)[real]
        emptied = hit == sequences.group_sizes[real]
        shares = (float((hit > 0).sum() / groups), float(emptied.sum() / groups))
    return Casualties(sequences.population(touched), sequences.population(~touched), groups, *shares)
