"""Evidence about pairs of log-probs: which are equal, the mean of ρ, on which side of 0 d lies, where μ is missing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.surprisal import is_entropy
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
# So many uncertain tokens of a rollout agree bit for bit only where one number is a copy of the other.
_LEAST_COPIED = 8
# ρ beyond e^20 is 'away from 1' whatever it is; this keeps sums finite.
_LARGEST_D = 20.0


def count_pairs(batch: RolloutBatch, piece: Piece, tally: Tally) -> NDArray[np.float64]:
    """[N] Σ(ρ − 1) by rollout, over tokens with two finite log-probs."""
    behaviour, target = piece.rollout, piece.trainer
    assert behaviour is not None
    assert target is not None
    equal, uncertain = behaviour == target, behaviour < np.float32(UNCERTAIN)
    tally.count(paired=piece.tokens, equal=int(np.count_nonzero(equal)), uncertain=int(np.count_nonzero(uncertain)))
    _count_copied(equal & uncertain, uncertain, piece, tally)
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
    if found:
        _count_without_behaviour(batch, piece, below, tally)
    np.minimum(d, np.float32(_LARGEST_D), out=d)
    np.expm1(d, out=d)
    if piece.entropy is not None and is_entropy(piece.entropy).all():
        weighted = float((d * target).sum(dtype=np.float64)) + float(target.sum(dtype=np.float64))
        tally.add(target_surprisal=-weighted, target_entropy=float(piece.entropy.sum(dtype=np.float64)))
    return row_sums(d, piece.offsets)


def _count_copied(copied: NDArray[np.bool_], uncertain: NDArray[np.bool_], piece: Piece, tally: Tally) -> None:
    """Count rollouts of which every uncertain token has one number for both log-probs."""
    of_rows = row_sums(uncertain, piece.offsets)
    tally.count(copiable_rollouts=int((of_rows >= _LEAST_COPIED).sum()))
    if np.count_nonzero(copied) >= _LEAST_COPIED:
        whole = (of_rows >= _LEAST_COPIED) & (row_sums(copied, piece.offsets) == of_rows)
        tally.count(copied_rollouts=int(whole.sum()))


def _count_without_behaviour(batch: RolloutBatch, piece: Piece, below: NDArray[np.bool_], tally: Tally) -> None:
    """Count tokens with log μ = 0 exactly and log π clearly below, and which of them stand first, last, or in an
    unbroken row of log μ = 0 up to the end."""
    assert piece.rollout is not None
    assert piece.trainer is not None
    zeros = np.flatnonzero(piece.rollout == 0)
    rows = np.searchsorted(piece.offsets, zeros, side="right") - 1
    ends = piece.offsets[rows + 1]
    zeros_after = np.searchsorted(zeros, ends) - 1 - np.arange(zeros.size)
    # Responses of nothing but zeros have no end that differs: greedy sampling logged as processed.
    lengths = np.diff(piece.offsets)
    trailing = (zeros_after == ends - 1 - zeros) & (np.bincount(rows, minlength=lengths.size) < lengths)[rows]
    missing = below[zeros]
    last = zeros == ends - 1
    tally.count(
        no_mu=int(missing.sum()),
        no_mu_first=int((missing & (zeros == piece.offsets[rows])).sum()),
        no_mu_last=int((missing & last).sum()),
        no_mu_trailing=int((missing & trailing).sum()),
    )
    places = zeros[missing]
    tally.add(no_mu_log_pi=float(np.maximum(piece.trainer[places], np.float32(-_LARGEST_D)).sum(dtype=np.float64)))
    for index in places[:3].tolist():
        text = f"id {batch.response_token_ids[piece.place(index)]}, log μ 0, log π {piece.trainer[index]:.3g}"
        tally.example("tokens_without_engine", example_at(batch, piece.place(index), text))
