"""Count pairs of log-probs: equal ones, the mean of ρ, the sign of d = log π − log μ, and tokens without a log μ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.after_id import LARGE_D
from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.pieces import Piece, row_sums
from foreshock.lint.evidence.surprisal import is_entropy
from foreshock.lint.evidence.values import example_at
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["count_pairs"]

# A token with log μ below this is uncertain: two computations of it agree in every bit by chance at most.
_UNCERTAIN = -0.01
# |d| above this is clearly not 0, and a log π below minus this is clearly uncertain.
_CLEARLY = 0.01
_CERTAIN = -1e-6
# This many uncertain tokens of a rollout agree bit for bit only if one column is a copy of the other.
_LEAST_COPIED = 8
# d is cut off here, which keeps sums of ρ finite; ρ = e^20 already moves any mean.
_LARGEST_D = 20.0


def count_pairs(batch: RolloutBatch, piece: Piece, builder: EvidenceBuilder) -> tuple[NDArray[np.float64], ...]:
    """Return Σ(ρ − 1) and Σ(ρ − 1 − d) by rollout, each of shape [N].

    Both log-probs of every token of the piece must be finite.
    """
    behaviour, target = piece.rollout, piece.trainer
    assert behaviour is not None
    assert target is not None
    equal, uncertain = behaviour == target, behaviour < np.float32(_UNCERTAIN)
    builder.count(paired=piece.tokens, equal=int(np.count_nonzero(equal)), uncertain=int(np.count_nonzero(uncertain)))
    _count_copied(equal & uncertain, uncertain, piece, builder)
    d = target - behaviour
    above, below = d > np.float32(_CLEARLY), d < np.float32(-_CLEARLY)
    certain = below & (behaviour >= np.float32(_CERTAIN))
    found = int(np.count_nonzero(certain))
    builder.count(
        above_zero=int(np.count_nonzero(above)), below_zero=int(np.count_nonzero(below)), certain_behaviour=found
    )
    if found and builder.has_room("processed_log_probs"):
        for index in np.flatnonzero(certain)[:3].tolist():
            text = f"log μ {behaviour[index]:.3g}, log π {target[index]:.3g}"
            builder.add_example("processed_log_probs", example_at(batch, piece.place(index), text))
    if found:
        _count_without_behaviour(batch, piece, below, builder)
    builder.count(large=_count_large(d))
    np.minimum(d, np.float32(_LARGEST_D), out=d)
    of_d = row_sums(d, piece.offsets)
    np.expm1(d, out=d)
    of_ratio = row_sums(d, piece.offsets)
    builder.add(paired_k3=float((of_ratio - of_d).sum()), paired_surprisal=-float(behaviour.sum(dtype=np.float64)))
    if piece.entropy is not None and is_entropy(piece.entropy).all():
        weighted = float((d * target).sum(dtype=np.float64)) + float(target.sum(dtype=np.float64))
        builder.add(target_surprisal=-weighted, target_entropy=float(piece.entropy.sum(dtype=np.float64)))
    return of_ratio, of_ratio - of_d


def _count_large(d: NDArray[np.float32]) -> int:
    """Return the number of tokens with |d| of LARGE_D or more; two reductions if there is none."""
    if d.size == 0 or (d.max() < LARGE_D and d.min() > -LARGE_D):
        return 0
    return int(np.count_nonzero(np.abs(d) >= np.float32(LARGE_D)))


def _count_copied(
    copied: NDArray[np.bool_], uncertain: NDArray[np.bool_], piece: Piece, builder: EvidenceBuilder
) -> None:
    """Count the rollouts in which log π equals log μ at every uncertain token."""
    of_rows = row_sums(uncertain, piece.offsets)
    builder.count(copiable_rollouts=int((of_rows >= _LEAST_COPIED).sum()))
    if np.count_nonzero(copied) >= _LEAST_COPIED:
        whole = (of_rows >= _LEAST_COPIED) & (row_sums(copied, piece.offsets) == of_rows)
        builder.count(copied_rollouts=int(whole.sum()))


def _count_without_behaviour(
    batch: RolloutBatch, piece: Piece, below: NDArray[np.bool_], builder: EvidenceBuilder
) -> None:
    """Count tokens with log μ = 0 and log π clearly below; of these: first ones, last ones, those in a run to the end.

    A run to the end is an unbroken row of log μ = 0 up to the last token of the response.
    """
    assert piece.rollout is not None
    assert piece.trainer is not None
    zeros = np.flatnonzero(piece.rollout == 0)
    rows = np.searchsorted(piece.offsets, zeros, side="right") - 1
    ends = piece.offsets[rows + 1]
    zeros_after = np.searchsorted(zeros, ends) - 1 - np.arange(zeros.size)
    # A response with log μ = 0 everywhere has no such run: greedy sampling logged as processed gives that too.
    lengths = np.diff(piece.offsets)
    trailing = (zeros_after == ends - 1 - zeros) & (np.bincount(rows, minlength=lengths.size) < lengths)[rows]
    missing = below[zeros]
    last = zeros == ends - 1
    builder.count(
        no_mu=int(missing.sum()),
        no_mu_first=int((missing & (zeros == piece.offsets[rows])).sum()),
        no_mu_last=int((missing & last).sum()),
        no_mu_trailing=int((missing & trailing).sum()),
    )
    places = zeros[missing]
    builder.add(no_mu_log_pi=float(np.maximum(piece.trainer[places], np.float32(-_LARGEST_D)).sum(dtype=np.float64)))
    for index in places[:3].tolist():
        text = f"id {batch.response_token_ids[piece.place(index)]}, log μ 0, log π {piece.trainer[index]:.3g}"
        builder.add_example("tokens_without_engine", example_at(batch, piece.place(index), text))
