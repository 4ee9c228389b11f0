"""Count how log μ and log π align: a shift by one token, or a constant factor between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.pieces import row_sums
from foreshock.lint.report import Example
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.ragged import take_rows

__all__ = ["count_alignment"]

# A sample is enough: a shift is in every rollout of a rank or a data source.
_MOST_TOKENS = 1 << 18
# Each difference counts at most this much, in nats, so that one outlier does not decide.
_SHIFT_CAP = 5.0
# A rollout is clearly shifted if it has this many tokens, a mean difference of 0.1 nats or more, and a quarter of that
# against its neighbour.
_CLEAR_TOKENS, _CLEAR_GAP, _CLEAR_FACTOR = 6, 0.1, 0.25
# log μ of a likely token, the largest log-prob of an uncertain one, and the least that is taken, in nats.
_LIKELY, _BELOW_ZERO, _LEAST_LOG_PROB = -1.0, -0.01, -100.0

_SCALE_OF_LIKELY, _SCALE_OF_UNLIKELY = (
    tuple(f"scale_{part}_{product}" for product in ("cross", "mu", "pi")) for part in ("likely", "unlikely")
)

Pairs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]


def count_alignment(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count shifts and factors over an even sample of the rollouts, tool tokens included."""
    sample = _sample_of_rollouts(batch)
    if sample is not None:
        _count_scale(sample[0], sample[1], builder)
        _count_shifts(batch, sample, builder)


def _sample_of_rollouts(batch: RolloutBatch) -> Pairs | None:
    """Return log μ [T], log π [T] and offsets of the sample; None if either was not logged."""
    if batch.rollout_log_probs is None or batch.trainer_log_probs is None:
        return None
    stride = _stride(batch)
    if stride <= 1:
        return batch.rollout_log_probs, batch.trainer_log_probs, batch.response_offsets
    positions, offsets = take_rows(batch.response_offsets, np.arange(0, batch.num_rollouts, stride))
    return batch.rollout_log_probs[positions], batch.trainer_log_probs[positions], offsets


def _count_scale(behaviour: NDArray[np.float32], target: NDArray[np.float32], builder: EvidenceBuilder) -> None:
    """Sum products of the two log-probs over likely and over unlikely tokens; a factor shows in both."""
    below = (behaviour < np.float32(_BELOW_ZERO)) & (target < np.float32(_BELOW_ZERO))
    chosen = (below & (behaviour > _LEAST_LOG_PROB) & (target > _LEAST_LOG_PROB)).nonzero()[0]
    mu, pi = behaviour[chosen], target[chosen]
    likely = mu > np.float32(_LIKELY)
    builder.count(scale_tokens=chosen.size)
    for (cross, of_mu, of_pi), of_part in ((_SCALE_OF_LIKELY, likely), (_SCALE_OF_UNLIKELY, ~likely)):
        one, other = mu[of_part].astype(np.float64), pi[of_part].astype(np.float64)
        products = {cross: one * other, of_mu: one * one, of_pi: other * other}
        builder.add(**{name: float(np.add.reduce(values)) for name, values in products.items()})


def _count_shifts(batch: RolloutBatch, sample: Pairs, builder: EvidenceBuilder) -> None:
    """Sum |log π_t − log μ_{t+s}| for s = −1, 0, 1 over the tokens t that have a neighbour on both sides."""
    behaviour, target, offsets = sample
    if behaviour.size < 3:
        return
    inner = np.ones(behaviour.size, dtype=np.bool_)
    filled = (offsets[1:] - offsets[:-1]).nonzero()[0]
    inner[offsets[:-1][filled]] = False
    inner[offsets[1:][filled] - 1] = False
    inner[0] = inner[-1] = False
    chosen = inner.nonzero()[0]
    of_target = target[chosen]
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = [np.abs(of_target - behaviour[chosen + shift]) for shift in (-1, 0, 1)]
    known = np.isfinite(gaps[0]) & np.isfinite(gaps[1]) & np.isfinite(gaps[2])
    if not known.all():
        gaps = [np.where(known, gap, np.float32(0.0)) for gap in gaps]
    running = np.zeros(inner.size + 1, np.int64)
    np.cumsum(inner, out=running[1:])
    rows = running[offsets]
    earlier, own, later = (row_sums(np.minimum(gap, np.float32(_SHIFT_CAP)), rows) for gap in gaps)
    tokens = row_sums(known, rows)
    counted = tokens > 0
    prefer_earlier, prefer_later = counted & (earlier < 0.5 * own), counted & (later < 0.5 * own)
    far = (tokens >= _CLEAR_TOKENS) & (own >= _CLEAR_GAP * tokens)
    builder.count(
        shift_clear_earlier=int((far & (earlier <= _CLEAR_FACTOR * own)).sum()),
        shift_clear_later=int((far & (later <= _CLEAR_FACTOR * own)).sum()),
        shift_tokens=int(tokens.sum()),
        shift_rollouts=int(counted.sum()),
        shift_prefer_earlier=int(prefer_earlier.sum()),
        shift_prefer_later=int(prefer_later.sum()),
    )
    by_earlier, by_later = builder.counts["shift_prefer_earlier"], builder.counts["shift_prefer_later"]
    preferring = prefer_earlier if by_earlier >= by_later else prefer_later
    most = min(2, max(by_earlier, by_later))
    worst = np.argsort(np.where(preferring, -own, 0.0), kind="stable")[:most].tolist() if most else ()
    for row in worst:
        start = int(offsets[row])
        four = slice(start, min(start + 4, int(offsets[row + 1])))
        text = f"log μ {_join(behaviour[four])}, log π {_join(target[four])}"
        builder.add_example("shifted_log_probs", Example(batch.sample_ids[row * _stride(batch)], 0, text))
    builder.add(shift_earlier=float(earlier.sum()), shift_none=float(own.sum()), shift_later=float(later.sum()))


def _stride(batch: RolloutBatch) -> int:
    """Return k so that every k-th rollout is in the sample."""
    return max(1, -(-batch.num_tokens // _MOST_TOKENS))


def _join(values: NDArray[np.float32]) -> str:
    return " ".join(f"{value:.3g}" for value in values.tolist())
