"""Evidence about pairs of log-probs: how many are equal, the mean of ρ, and on which side of 0 d lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.tally import Tally
from foreshock.lint.tokens import Piece, row_sums
from foreshock.lint.values import example_at
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["CLEARLY", "UNCERTAIN", "count_pairs"]

# A token is uncertain below this log μ: two computations of it then agree in every bit by chance at most.
UNCERTAIN = -0.01
# d is clearly off 0 beyond this, and a probability clearly below 1.
CLEARLY = 0.01
_CERTAIN = -1e-6
# ρ beyond e^20 is 'away from 1' whatever it is; this keeps sums finite.
_LARGEST_D = 20.0


def count_pairs(batch: RolloutBatch, piece: Piece, tally: Tally) -> NDArray[np.float64]:
    """[N] Σ(ρ − 1) by rollout, over tokens with two finite log-probs."""
    behaviour, target = piece.rollout, piece.trainer
    assert behaviour is not None
    assert target is not None
    tally.count(
        paired=piece.tokens,
        equal=int(np.count_nonzero(behaviour == target)),
        uncertain=int(np.count_nonzero(behaviour < np.float32(UNCERTAIN))),
    )
    d = target - behaviour
    above, below = d > np.float32(CLEARLY), d < np.float32(-CLEARLY)
    certain = below & (behaviour >= np.float32(_CERTAIN))
    found = int(np.count_nonzero(certain))
    tally.count(
        above_zero=int(np.count_nonzero(above)), below_zero=int(np.count_nonzero(below)), certain_behaviour=found
    )
    if found and tally.wants_example("processed_log_probs"):
        for index in np.flatnonzero(certain)[:3].tolist():
            text = f"log μ {behaviour[index]:.3g}, log π {target[index]:.3g}"
            tally.example("processed_log_probs", example_at(batch, piece.place(index), text))
    np.minimum(d, np.float32(_LARGEST_D), out=d)
    np.expm1(d, out=d)
    return row_sums(d, piece.offsets)
